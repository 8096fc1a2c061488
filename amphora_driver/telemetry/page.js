// Replaces the parts of the page by newer ones. Without it the page is the same, and older.
(() => {
  "use strict";
  const EVERY = 5000;
  const known = {};
  // Without the password that somebody may have typed into the address: a fetch of one that has it is refused.
  const place = new URL("page.json" + location.search, location.origin + location.pathname);
  let last = Date.now();

  const busy = (element) => {
    // Who reads with a keyboard or copies a line keeps his place.
    const chosen = document.getSelection();
    return element.contains(document.activeElement) ||
      (chosen !== null && !chosen.isCollapsed && chosen.anchorNode !== null && element.contains(chosen.anchorNode));
  };

  const show = (told) => {
    for (const [name, text] of Object.entries(told.parts)) {
      const element = document.querySelector(`[data-part="${name}"]`);
      if (element === null || known[name] === text || busy(element)) continue;
      // Escaped where it was made, and the policy of the page lets nothing in it run.
      element.innerHTML = text;
      known[name] = text;
    }
    document.title = told.title;
    document.documentElement.dataset.level = told.level;
  };

  const look = async () => {
    if (!document.hidden) {
      try {
        const answer = await fetch(place, { cache: "no-store", credentials: "same-origin" });
        if (!answer.ok) throw new Error(String(answer.status));
        show(await answer.json());
        last = Date.now();
        delete document.documentElement.dataset.lost;
      } catch (error) {
        document.documentElement.dataset.lost = "";
        const seconds = Math.round((Date.now() - last) / 1000);
        document.getElementById("lost").textContent =
          `This page has had no answer for ${seconds} s. What it shows is that old.`;
      }
    }
    setTimeout(look, EVERY);
  };

  document.addEventListener("visibilitychange", () => { if (!document.hidden) last = Date.now(); });
  setTimeout(look, EVERY);
})();
