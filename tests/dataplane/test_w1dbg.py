import test_crash_points as t
_old=t.settled
seen=[]
def settled(a,g):
    r=_old(a,g)
    if not r:
        try: seen.append((a.call("GET","/v2/bundle")[1], (a.var/"unfinished").exists(), t.served(a), t.on_disk(a), sorted(x.name for x in a.var.iterdir())))
        except Exception as e: seen.append(repr(e))
    return r
t.settled=settled
import pytest
@pytest.fixture(autouse=True)
def show(small):
    yield
    for s in seen[-1:]: print(s)
    print(small.log()[-5000:])
from test_crash_points import *
