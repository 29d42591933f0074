# Prints what a ctest run came to: skipped tests with their reasons, failed tests, and one last line.
#
# Usage: test_summary.py RESULTS.xml CTEST_EXIT_STATUS TESTS_LEFT_OUT GPUS
# TESTS_LEFT_OUT are tests that this machine cannot run, counted as skipped. Exits 1 on any failure.
"""Summary of a ctest run."""

import collections
import re
import sys
import xml.etree.ElementTree as ElementTree


def skip_reason(output: str) -> str:
    """The reason that GoogleTest or pytest printed for a skip, or a general word."""
    lines = [line.strip() for line in output.splitlines()]
    for index, line in enumerate(lines):
        match = re.match(r"SKIPPED \[\d+\] \S+ (.*)", line)
        if match:
            return match.group(1)
        if re.search(r": Skipped$", line):
            reason = [text for text in lines[index + 1 :] if text and not text.startswith("[")]
            return reason[0] if reason else "no reason given"
    return "no reason given"


def main() -> int:
    results, ctest_status, left_out, gpus = sys.argv[1], *map(int, sys.argv[2:5])
    passed, failed, skipped = 0, [], collections.Counter()
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        status = case.get("status")
        output = case.findtext("system-out") or ""
        skip = case.find("skipped")
        if status == "run":
            passed += 1
        elif status == "notrun" and skip is not None and "SKIP" in (skip.get("message") or ""):
            skipped[skip_reason(output)] += 1
        elif status == "disabled":
            skipped["disabled"] += 1
        else:
            failed.append(case.get("name"))
    if left_out:
        skipped[f"needs more GPUs than this machine has ({gpus})"] += left_out
    if ctest_status and not failed:
        failed.append(f"ctest itself, with exit status {ctest_status}")
    for reason, count in skipped.most_common():
        print(f"skipped {count}: {reason}")
    for name in failed:
        print(f"FAILED {name}")
    print(f"{passed} passed, {len(failed)} failed, {sum(skipped.values())} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
