#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# The runners themselves: what is wrong must come out as failed.

set -u
run_vectors=$KVRELAY_BUILD/tests/run_vectors
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

# expect NAME STATUS PATTERN COMMAND…: the command ends with STATUS and prints a line that matches PATTERN.
expect() {
  name=$1 status=$2 pattern=$3
  shift 3
  "$@" >"$work/out" 2>&1
  got=$?
  if [ $got -eq "$status" ] && grep -q -e "$pattern" "$work/out"; then
    echo "ok - $name"
  else
    echo "not ok - $name: status $got, wanted $status and a line like: $pattern"
    sed 's/^/# /' "$work/out"
    failed=1
  fi
}

vectors() { # text of the array
  printf '{"format":"kvrelay-vectors","version":1,"subject":"hashfmt","vectors":[%s]}\n' "$1" >"$work/v.json"
}

program() { # text of a script
  printf '#!/bin/sh\n%s\n' "$1" >"$work/program"
  chmod +x "$work/program"
}

seed='{"id":"a","kind":"seed","input":{"lora_name":null,"cache_namespace":null},"expected":{"seed":"SEED"}}'
vectors "$(echo "$seed" | sed s/SEED/1337/)"
expect 'right vector passes' 0 '^1 passed, 0 failed$' "$run_vectors" "$work/v.json"
expect 'and fails when falsified' 0 '^1 passed, 0 failed$' "$run_vectors" --self-test "$work/v.json"
vectors "$(echo "$seed" | sed s/SEED/1338/)"
expect 'wrong expectation fails' 1 '^FAILED hashfmt seed a: ' "$run_vectors" "$work/v.json"
vectors "$(echo "$seed" | sed s/SEED/1337x/)"
expect 'unreadable expectation fails' 1 '^FAILED hashfmt seed a: wanted a 64-bit number' "$run_vectors" "$work/v.json"
vectors '{"id":"a","kind":"seed","input":{"lora_name":null,"cache_namespace":null}}'
expect 'missing expectation fails' 1 '^FAILED hashfmt seed a: ' "$run_vectors" "$work/v.json"
vectors '{"id":"a","kind":"no such kind"}'
expect 'unknown kind fails' 1 '^FAILED hashfmt no such kind a: nothing runs this kind$' "$run_vectors" "$work/v.json"
echo '{"format":"kvrelay-vectors","version":2,"subject":"hashfmt","vectors":[]}' >"$work/v.json"
expect 'other version is refused' 2 'not a kvrelay-vectors file' "$run_vectors" "$work/v.json"
echo '{"format":' >"$work/v.json"
expect 'cut file is refused' 2 'v.json:' "$run_vectors" "$work/v.json"

program 'echo "ok - one"; echo "not ok - two"'
expect 'not ok counts' 1 '^1 passed, 1 failed$' scripts/run-tests "$work/program"
program 'echo "ok - one"; exit 3'
expect 'bad status counts' 1 '^1 passed, 1 failed$' scripts/run-tests "$work/program"
program 'sleep 0.1; echo "ok - one"'
cp "$work/program" "$work/other"
expect 'programs at once are all counted' 0 '^2 passed, 0 failed$' scripts/run-tests --jobs 2 "$work/program" "$work/other"
program 'echo said; exit 3'
expect 'a gate that fails is shown' 0 '^said$' scripts/gate "$work/total" name "$work/program"
expect 'and counted' 0 '^0 1$' cat "$work/total"
program 'exit 0'
expect 'silence counts' 1 '^0 passed, 1 failed$' scripts/run-tests "$work/program"
program 'echo "[====] Synthesis: Tested: 3 | Passing: 1 | Failing: 0 | Crashing: 2"; exit 1'
expect 'crashes count' 1 '^1 passed, 2 failed$' scripts/run-tests "$work/program"
program 'echo "==1==ERROR: LeakSanitizer: detected memory leaks"; echo "ok - one"'
expect 'sanitizer report counts' 1 '^1 passed, 1 failed$' scripts/run-tests "$work/program"
program 'echo "ok - one"; sleep 30'
expect 'too slow counts' 1 '^1 passed, 1 failed$' scripts/run-tests --timeout 0.3 "$work/program"
expect 'missing program counts' 1 '^0 passed, 1 failed$' scripts/run-tests "$work/none"
program 'exit 0'
expect 'missing emulator counts' 1 '^0 passed, 1 failed$' scripts/run-tests --through "$work/none" "$work/program"

# The table of ids, for two lists that share one.
mkdir -p "$work/c/tests/conform" "$work/c/results"
printf 'elsewhere other\nC1 one thing\nT2 a second\n' >"$work/c/tests/conform/scenarios"
printf 'suites grpc_.*\nC1 another\nB10.4 a third\n' >"$work/c/tests/conform/grpc"
table() { # results of unit tests, of a script
  printf '%b' "$1" >"$work/c/results/test_x"
  printf '%b' "$2" >"$work/c/results/x.py"
  (cd "$work/c" && "$TOP/scripts/conform" table results)
}
units='ok - relay::C1_T2_both  (0.00s)\nok - grpc_wire::C1_x  (0.00s)\nok - other::C9_x  (0.00s)\n'
expect 'each id has its test' 0 '^4 passed, 0 failed$' table "$units" 'ok - B10.4: x\n'
expect 'and as B10_4' 0 '^4 passed, 0 failed$' table "$units"'ok - tcp::B10_4_x  (0.00s)\n' ''
expect 'an id without a test fails' 1 '^B10.4 *FAILED' table "$units" 'ok - x\n'
expect 'one of the other list does not count' 1 '^3 passed, 1 failed$' table 'ok - relay::C1_T2_x  (0.00s)\n' 'ok - B10.4: x\n'
expect 'a failed test fails its id' 1 '^B10.4 *FAILED' table "$units" 'ok - B10.4: x\nnot ok - C1, B10.4: x: why\n'
expect 'an id that no list has fails' 1 '^B10.5 *FAILED' table "$units" 'ok - B10.4 B10.5: x\n'

# "make check" itself, in a tree whose gates all pass: a runner that ends without having counted is a failure.
tree=$work/tree
mkdir -p "$tree/scripts" "$tree/examples" "$tree/tests" "$tree/build/asan" "$tree/build/tests"
cp scripts/check "$tree/scripts"
touch "$tree/examples/one.c" "$tree/examples/one.cpp"
for gate in scripts/check-header scripts/check-symbols scripts/check-toc scripts/check-examples scripts/firmware \
  scripts/sync-xxh3 scripts/conform; do
  ln -s /bin/true "$tree/$gate"
done
check() { # text of the runner, text of make
  printf '#!/bin/sh\n%s\n' "$1" >"$tree/scripts/run-tests"
  printf '#!/bin/sh\n%s\n' "$2" >"$tree/make"
  chmod +x "$tree/scripts/run-tests" "$tree/make"
  MAKE=$tree/make BUILD=$tree/build "$tree/scripts/check"
}
made='mkdir -p "${0%/*}/build/tests"; for p in run_vectors sim; do ln -sf /bin/true "${0%/*}/build/tests/$p"; mkdir -p "${0%/*}/build/asan/tests"; ln -sf /bin/true "${0%/*}/build/asan/tests/$p"; done; mkdir -p "${0%/*}/tests/e2e"'
counts='while [ "$1" != --total ]; do shift; done; echo 1 0 >>"$2"'
short='for word; do case $word in TOTAL=*) total=${word#*=} ;; cross-short) echo 1 0 >>"$total" ;; esac; done'
expect 'good runners pass' 0 '^[0-9]* passed, 0 failed$' check "$counts" "$made; $short"
expect 'crashing runner counts' 1 '^[0-9]* passed, 3 failed$' check 'kill -SEGV $$' "$made; $short"
expect 'crashing emulated run counts' 1 '^[0-9]* passed, 1 failed$' check "$counts" "$made"
exit $failed
