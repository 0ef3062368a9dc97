#!/usr/bin/env python3
"""Adds userfaultfd to the seccomp profile of a container engine.

seccomp.py DEFAULT.json > uzswap.json; docker run --security-opt seccomp=uzswap.json ...

DEFAULT.json is the engine's own profile: profiles/seccomp/default.json in Docker's sources, or Podman's
/usr/share/containers/seccomp.json. Without capabilities the kernel permits userfaultfd only for faults in the program
itself, not in the kernel (UFFD_USER_MODE_ONLY). uzswap needs no others.
"""

import json
import sys

CALL = "userfaultfd"
PERMIT = "SCMP_ACT_ALLOW"


def with_userfaultfd(profile):
    """The profile with the call permitted to everybody. Podman's profile denies it by name; such a rule loses it."""

    def is_for_everybody(rule):
        return not any(rule.get(condition) for condition in ("args", "includes", "excludes"))

    rules = []
    for rule in profile["syscalls"]:
        if CALL in rule.get("names", []) and rule["action"] != PERMIT:
            rule = {**rule, "names": [name for name in rule["names"] if name != CALL]}
            if not rule["names"]:
                continue
        rules.append(rule)
    permitting = (rule for rule in rules if CALL in rule.get("names", []))
    if not any(map(is_for_everybody, permitting)):
        rules.append({"names": [CALL], "action": PERMIT})
    return {**profile, "syscalls": rules}


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: seccomp.py DEFAULT.json > uzswap.json")
    try:
        with open(sys.argv[1], encoding="utf-8") as file:
            profile = json.load(file)
        changed = with_userfaultfd(profile)
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"seccomp.py: {sys.argv[1]} is no seccomp profile: {error}")
    json.dump(changed, sys.stdout, indent="\t")
    print()


if __name__ == "__main__":
    main()
