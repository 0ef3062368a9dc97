#!/usr/bin/env python3
"""Makes a seccomp profile that also permits userfaultfd from the one that a container engine uses.

seccomp.py DEFAULT.json > uzswap.json; docker run --security-opt seccomp=uzswap.json ...

DEFAULT.json is the engine's own: profiles/seccomp/default.json of Docker's sources, /usr/share/containers/seccomp.json
of Podman's. Without capabilities the kernel lets a program use userfaultfd for faults of its own only
(UFFD_USER_MODE_ONLY). uzswap asks for no others.
"""

import json
import sys

CALL = "userfaultfd"


def with_userfaultfd(profile):
    """The profile with one more rule; as it is if it permits the call to everybody already."""
    rules = profile["syscalls"]
    conditions = ("args", "includes", "excludes")
    for rule in rules:
        is_permitted = CALL in rule.get("names", []) and rule["action"] == "SCMP_ACT_ALLOW"
        if is_permitted and not any(rule.get(condition) for condition in conditions):
            return profile
    return {**profile, "syscalls": [*rules, {"names": [CALL], "action": "SCMP_ACT_ALLOW"}]}


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
