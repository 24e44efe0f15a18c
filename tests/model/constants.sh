#!/bin/sh
# constants.sh PROGRAM: constants.pml must be what PROGRAM prints now. To bring it up to date after a
# change of the code: PROGRAM > tests/model/constants.pml, then run the models.
echo 1..1
if difference=$("$1" | diff - "$(dirname "$0")/constants.pml"); then
    echo "ok 1 - the models' constants are the code's"
else
    echo "$difference" | sed 's/^/# /'
    echo "not ok 1 - the models' constants are the code's"
fi
