"""Runs the functions named test_* of a module, one TAP line each. An argument is the server's URL."""

import inspect
import sys
import traceback


def main(module, *args):
    failed = 0
    for name, fn in inspect.getmembers(module, inspect.isfunction):
        if not name.startswith("test_"):
            continue
        try:
            fn(*args)
            print(f"ok - {module.__name__}: {name}", flush=True)
        except Exception:  # every failure of a client is a failed test
            failed += 1
            print(f"not ok - {module.__name__}: {name}", flush=True)
            for line in traceback.format_exc().splitlines():
                print(f"# {line}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.path.insert(0, sys.path[0])
    sys.exit(main(__import__(sys.argv[1]), *sys.argv[2:]))
