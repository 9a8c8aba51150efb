"""Insist that a wheel holds every tracked file of the package, and nothing else.

python .ci/wheel_contents.py WHEEL
"""

import subprocess
import sys
import zipfile

listing = subprocess.run(["git", "ls-files", "outbox"], check=True, capture_output=True, text=True)
tracked = set(listing.stdout.split())
with zipfile.ZipFile(sys.argv[1]) as wheel:
    packed = {name for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}

complaints = [f"missing in the wheel: {name}" for name in sorted(tracked - packed)]
complaints += [f"not a file of the package: {name}" for name in sorted(packed - tracked)]
if complaints:
    sys.exit("\n".join(complaints))
print(f"{sys.argv[1]} holds the {len(packed)} files of the package.")
