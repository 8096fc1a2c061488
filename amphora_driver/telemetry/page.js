// The script updates the parts of the status page every five seconds. Without scripts, the page has the same contents.
(() => {
  "use strict";
  const INTERVAL_MS = 5000;
  const known = {};
  // fetch() refuses a URL with a user name and a password, so the URL omits both values of the page's address.
  const url = new URL("page.json" + location.search, location.origin + location.pathname);
  let lastUpdate = Date.now();

  const inUse = (element) => {
    // An update of an element in use would lose the keyboard focus or the selected text.
    const selection = document.getSelection();
    return element.contains(document.activeElement) ||
      (selection !== null && !selection.isCollapsed && selection.anchorNode !== null &&
        element.contains(selection.anchorNode));
  };

  const show = (update) => {
    for (const [name, text] of Object.entries(update.parts)) {
      const element = document.querySelector(`[data-part="${name}"]`);
      if (element === null || known[name] === text || inUse(element)) continue;
      // The server has escaped all values of the status page, and the content security policy blocks scripts in the text.
      element.innerHTML = text;
      known[name] = text;
    }
    document.title = update.title;
    document.documentElement.dataset.level = update.level;
  };

  const refresh = async () => {
    if (!document.hidden) {
      try {
        const response = await fetch(url, { cache: "no-store", credentials: "same-origin" });
        if (!response.ok) throw new Error(String(response.status));
        show(await response.json());
        lastUpdate = Date.now();
        delete document.documentElement.dataset.lost;
      } catch (error) {
        document.documentElement.dataset.lost = "";
        const seconds = Math.round((Date.now() - lastUpdate) / 1000);
        document.getElementById("lost").textContent =
          `The server has not answered for ${seconds} s. The page shows data of that age.`;
      }
    }
    setTimeout(refresh, INTERVAL_MS);
  };

  document.addEventListener("visibilitychange", () => { if (!document.hidden) lastUpdate = Date.now(); });
  setTimeout(refresh, INTERVAL_MS);
})();
