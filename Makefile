# SPDX-License-Identifier: Apache-2.0
#
# kvrelay. "make help" lists the targets. Everything is written below $(BUILD); CC, CXX, CFLAGS, LDFLAGS are honoured.

BUILD ?= build
CFLAGS ?= -O2 -g

.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
.SECONDARY:
MAKEFLAGS += --no-builtin-rules

# ---- sources: what is there is built ----

CORES := hashfmt.h ckf.h ckf_ingest.h kvrelay.h
PROTOS := $(wildcard proto/*.proto)
LIB_SRC := $(wildcard src/*.c proto/*.c transports/*.c transports/*/*.c)
DAEMON_SRC := $(wildcard tools/kvrelayd/*.c)
TOOL_SRC := $(wildcard tools/kvrelay/*.c)
COMMON_SRC := $(wildcard tools/common/*.c)
UNIT_SRC := $(wildcard tests/unit/test_*.c)
SUPPORT_SRC := $(wildcard tests/support/*.c) tests/vectors/vectors.c
HELPER_SRC := $(wildcard tests/programs/*.c)
SIM_SRC := $(wildcard tests/sim/*.c)
FUZZ_SRC := $(wildcard tests/fuzz/fuzz_*.c)
VECTOR_SRC := tests/vectors/run_vectors.c $(wildcard tests/vectors/vec_*.c)
BENCH_SRC := $(wildcard bench/bench_*.c)
VECTORS := $(wildcard tests/vectors/*.json)

PB_SRC := $(PROTOS:%.proto=$(BUILD)/%.pb.c)
PROTOSET := $(BUILD)/kvrelay.protoset
PB_PY := $(PROTOS:proto/%.proto=$(BUILD)/tests/python/%_pb2.py) $(BUILD)/tests/python/testing_pb2.py

obj = $(patsubst %.c,$(BUILD)/obj/%.o,$(1))

LIB := $(BUILD)/libkvrelay.a
COMMON := $(BUILD)/libcommon.a
SUPPORT := $(BUILD)/tests/libsupport.a
INSIDES := $(BUILD)/tests/libinsides.a
PROGRAMS := $(BUILD)/kvrelayd $(BUILD)/kvrelay
UNITS := $(UNIT_SRC:tests/unit/%.c=$(BUILD)/tests/%)
HELPERS := $(HELPER_SRC:tests/programs/%.c=$(BUILD)/tests/%)
FUZZERS := $(FUZZ_SRC:tests/fuzz/%.c=$(BUILD)/tests/%)
RUN_VECTORS := $(BUILD)/tests/run_vectors
EXAMPLES := $(patsubst examples/%.c,$(BUILD)/examples/%,$(wildcard examples/*.c)) \
  $(patsubst examples/%.cpp,$(BUILD)/examples/%_cpp,$(wildcard examples/*.cpp))
BENCHES := $(BENCH_SRC:bench/%.c=$(BUILD)/bench/%)
# Both ends of gRPC in processes of their own, ours and, where it is installed, C++ gRPC's.
GRPCPP := $(and $(shell command -v grpc_cpp_plugin),$(wildcard /usr/include/grpcpp/grpcpp.h))
BENCH_PEERS := $(patsubst bench/%.c,$(BUILD)/bench/%,$(wildcard bench/peers/*.c)) \
  $(if $(GRPCPP),$(patsubst bench/%.cc,$(BUILD)/bench/%,$(wildcard bench/peers/*.cc)))

# ---- flags ----

CLANG := $(findstring clang,$(shell $(CC) --version 2>/dev/null))
WARN := $(shell scripts/warnings $(if $(CLANG),clang,gcc) c)
WARN_CXX = $(shell scripts/warnings $(if $(findstring clang,$(shell $(CXX) --version)),clang,gcc) c++)
# Criterion's macros expand to code that these warnings dislike.
WARN_UNIT := -Wno-missing-prototypes -Wno-redundant-decls -Wno-conversion -Wno-sign-conversion -Wno-shadow -Wno-pedantic \
  -Wno-undef -Wno-cast-qual -Wno-null-dereference -Wno-double-promotion -Wno-format-nonliteral \
  $(if $(CLANG),-Wno-extra-semi-stmt -Wno-unreachable-code -Wno-gnu-zero-variadic-macro-arguments -Wno-shadow-all,-Wno-duplicated-branches)

# Compression is built in when its header is there; WITHOUT='zlib zstd' leaves it out.
have = $(if $(filter $(1),$(WITHOUT)),,$(shell echo '$(hash)include <$(2)>' | $(CC) $(CPPFLAGS) -E -x c - >/dev/null 2>&1 && echo yes))
hash := \#
HAVE_ZLIB := $(call have,zlib,zlib.h)
HAVE_ZSTD := $(call have,zstd,zstd.h)
CODECS := $(if $(HAVE_ZLIB),-DKVRELAY_HAVE_ZLIB) $(if $(HAVE_ZSTD),-DKVRELAY_HAVE_ZSTD)

CPPFLAGS_ALL = -I. -Iproto -Itransports -Itools/common -I$(BUILD)/proto -D_GNU_SOURCE $(CODECS) $(CPPFLAGS)
COMPILE = $(CC) -std=c11 $(CPPFLAGS_ALL) $(CFLAGS) -MMD -MP
LINK = $(CC) $(CFLAGS) $(LDFLAGS) -Wl,--as-needed

LIBS := -lprotobuf-nanopb -lmpack -lnghttp2 -levent_core -lzmq -lcyaml -lyaml -lyajl -ljansson -lssl -lcrypto $(if $(HAVE_ZLIB),-lz) $(if $(HAVE_ZSTD),-lzstd) -lpthread -lm
TEST_LIBS := -lcriterion -ljansson -lxxhash

# A unit test or benchmark may carry a line "/* make: -DX=Y -lz */" with flags of its own.
own_flags = $(shell sed -n 's|^/\* make: *\(.*\) \*/$$|\1|p' $(1))
own_compile = $(filter-out -l%,$(call own_flags,$(1)))
own_link = $(filter -l%,$(call own_flags,$(1)))

# ---- programs and library ----

all: $(LIB) $(PROGRAMS) $(PROTOSET) ## build the library, kvrelayd, kvrelay and the protoset for tools

$(BUILD)/kvrelayd: $(call obj,$(DAEMON_SRC)) $(COMMON) $(LIB)
	$(LINK) $^ $(LIBS) -o $@

$(BUILD)/kvrelay: $(call obj,$(TOOL_SRC)) $(COMMON) $(LIB)
	$(LINK) $^ $(LIBS) -o $@

$(LIB): $(call obj,$(LIB_SRC)) $(PB_SRC:.c=.o) $(BUILD)/proto/descriptors.o
$(COMMON): $(call obj,$(COMMON_SRC))
$(SUPPORT): $(call obj,$(SUPPORT_SRC))
$(INSIDES): $(call obj,$(filter-out %/main.c,$(DAEMON_SRC) $(TOOL_SRC)))
$(LIB) $(COMMON) $(SUPPORT) $(INSIDES):
	@mkdir -p $(@D)
	@rm -f $@
	$(AR) rcs $@ $^

# Objects are made anew when compiler or flags change, but not when nothing did.
STAMP := $(BUILD)/flags
FLAGS_NOW = $(CC) $(CXX) $(CPPFLAGS_ALL) $(CFLAGS) $(LDFLAGS) $(WARN) $(WARN_UNIT)
$(STAMP): FORCE
	@mkdir -p $(@D)
	@echo '$(FLAGS_NOW)' | cmp -s - $@ || echo '$(FLAGS_NOW)' >$@

$(BUILD)/obj/%.o: %.c $(STAMP) | $(PB_SRC)
	@mkdir -p $(@D)
	$(COMPILE) $(WARN) -c $< -o $@

ifneq ($(filter x86_64-%,$(shell $(CC) -dumpmachine)),)
$(BUILD)/obj/tests/support/kernel_avx2.o: private override CFLAGS += -mavx2
endif

$(BUILD)/proto/%.o: $(BUILD)/proto/%.c $(STAMP)
	$(COMPILE) -c $< -o $@

$(BUILD)/proto/%.pb.c: proto/%.proto $(wildcard proto/*.options)
	@mkdir -p $(@D)
	@command -v nanopb_generator.py >/dev/null || { echo 'packages are missing: make deps' >&2; exit 1; }
	nanopb_generator.py -q --error-on-unmatched -I proto -D $(@D) $*.proto
	@sed -i '1i #pragma GCC system_header /* warnings about it help nobody */' $(@D)/$*.pb.h
$(BUILD)/proto/%.pb.h: $(BUILD)/proto/%.pb.c ;

# What servers say of themselves: all files under the names that tools know them by, one of them once more under its package's older
# name. The protoset is for tools that have to do without reflection.
PUBLIC_NAMES := grpc/health/v1/health.proto=proto/health.proto grpc/reflection/v1/reflection.proto=proto/reflection.proto \
  grpc/reflection/v1alpha/reflection.proto=$(BUILD)/proto/reflection_v1alpha.proto
$(BUILD)/proto/reflection_v1alpha.proto: proto/reflection.proto
	@mkdir -p $(@D)
	sed 's/^package grpc.reflection.v1;/package grpc.reflection.v1alpha;/' $< >$@
$(PROTOSET): $(PROTOS) $(BUILD)/proto/reflection_v1alpha.proto
	protoc --descriptor_set_out=$@ --include_imports -I proto $(PUBLIC_NAMES:%=-I %) kvrelay.proto $(foreach n,$(PUBLIC_NAMES),$(firstword $(subst =, ,$(n))))
$(BUILD)/proto/descriptors.c: $(PROTOSET) scripts/embed-descriptors
	scripts/embed-descriptors $< >$@

# ---- tests ----

$(BUILD)/obj/tests/unit/%.o: tests/unit/%.c $(STAMP) | $(PB_SRC)
	@mkdir -p $(@D)
	$(COMPILE) -Itests $(WARN) $(WARN_UNIT) $(call own_compile,$<) -c $< -o $@

$(BUILD)/tests/test_%: $(BUILD)/obj/tests/unit/test_%.o $(SUPPORT) $(COMMON) $(LIB)
	@mkdir -p $(@D)
	$(LINK) -Wl,--start-group $^ -Wl,--end-group $(call own_link,tests/unit/test_$*.c) $(TEST_LIBS) $(LIBS) -o $@

# Tests of a program reach into it: all of it but main.c.
$(filter $(BUILD)/tests/test_kvrelayd% $(BUILD)/tests/test_tool%,$(UNITS)): $(INSIDES)

# Tests of faults get these calls through tests/support/faults.c.
WRAPPED := clock_gettime malloc calloc realloc read readv recv recvmsg send sendmsg accept4 socket connect nghttp2_session_client_new2
$(filter %_faults,$(UNITS)): private LINK += $(WRAPPED:%=-Wl,--wrap=%)

$(RUN_VECTORS): $(call obj,$(VECTOR_SRC)) $(SUPPORT) $(COMMON) $(LIB)
	$(LINK) $^ $(TEST_LIBS) $(LIBS) -o $@

# What calls a fuzz target: the program that replays files, or, as FUZZ_MAIN=-fsanitize=fuzzer, libFuzzer.
FUZZ_MAIN ?= $(call obj,tests/fuzz/driver.c)
$(FUZZERS): $(BUILD)/tests/fuzz_%: $(BUILD)/obj/tests/fuzz/fuzz_%.o $(call obj,tests/fuzz/driver.c) $(SUPPORT) $(LIB)
	@mkdir -p $(@D)
	$(LINK) $< $(FUZZ_MAIN) -Wl,--start-group $(filter %.a,$^) -Wl,--end-group $(LIBS) -o $@
$(BUILD)/tests/fuzz_files: $(INSIDES) $(COMMON)

fuzzers: $(FUZZERS)

# The simulated world.
SIM := $(BUILD)/tests/sim
$(SIM): $(call obj,$(SIM_SRC)) $(LIB)
	@mkdir -p $(@D)
	$(LINK) $^ $(LIBS) -o $@

sim: $(SIM) ## seeds of the simulated world: SEEDS=N (1000) from SEED=N (1) on
	@$(SIM) --seeds $(or $(SEEDS),1000) $(if $(SEED),--seed $(SEED))

# Programs that end-to-end scripts run.
$(HELPERS): $(BUILD)/tests/%: $(BUILD)/obj/tests/programs/%.o $(SUPPORT) $(LIB)
	$(LINK) -Wl,--start-group $^ -Wl,--end-group $(LIBS) -o $@
$(BUILD)/tests/reported_load: $(INSIDES) $(COMMON)

# The table of run_vectors.c holds the domains that exist.
DOMAINS := $(patsubst tests/vectors/vec_%.c,%,$(wildcard tests/vectors/vec_*.c))
$(BUILD)/obj/tests/vectors/run_vectors.o: private CPPFLAGS += $(foreach d,$(DOMAINS),-DHAVE_VEC_$(shell echo $(d) | tr a-z A-Z))
$(BUILD)/obj/tests/vectors/run_vectors.o: $(wildcard tests/vectors/vec_*.c)

# ---- foreign machines: what needs the cores alone, linked statically, run by an emulator ----

# Big endian with 32 and 64 bits, little endian with 32, and the one whose vector kernel no other runs.
MACHINES := mips s390x i686 aarch64
CROSS_QEMU_mips := qemu-mips
CROSS_QEMU_s390x := qemu-s390x
CROSS_QEMU_i686 := qemu-i386
CROSS_QEMU_aarch64 := qemu-aarch64
CROSS_JSON := tests/vectors/hashfmt.json tests/vectors/ckf.json
CROSS_VECTORS := $(patsubst %.c,%,tests/vectors/run_vectors.c tests/vectors/vectors.c tests/vectors/vec_hashfmt.c tests/vectors/vec_ckf.c tests/support/reference_search.c)
ifneq ($(filter cross-%,$(MAKECMDGOALS)),) # other targets need not look for them
# Tests and fuzz targets that include nothing else of ours.
CROSS_UNITS := $(basename $(notdir $(shell scripts/core-tests $(UNIT_SRC) $(FUZZ_SRC))))
cross_programs = $(CROSS_UNITS:%=$(BUILD)/cross/$(1)/%) $(BUILD)/cross/$(1)/run_vectors

define CROSS_RULES
$(BUILD)/cross/$(1)/obj/%.o: %.c | deps-check $(BUILD)/cross/include/xxhash.h
	@mkdir -p $$(@D)
	$(1)-linux-gnu-gcc -std=c11 -O2 -g -MMD -MP -D_GNU_SOURCE -D_FILE_OFFSET_BITS=64 -DHAVE_VEC_HASHFMT -DHAVE_VEC_CKF -Itests/cross -I. -Itests \
	  -I$(BUILD)/cross/include -Wall -Wextra -Werror -Wno-sign-compare -Wno-format-zero-length $$(call own_compile,$$<) -c $$< -o $$@
$(BUILD)/cross/$(1)/xxhash.o: $(BUILD)/cross/include/xxhash.h
	@mkdir -p $$(@D)
	$(1)-linux-gnu-gcc -O2 -DXXH_STATIC_LINKING_ONLY -DXXH_IMPLEMENTATION -x c -c $$< -o $$@
$(BUILD)/cross/$(1)/test_%: $(BUILD)/cross/$(1)/obj/tests/unit/test_%.o $(BUILD)/cross/$(1)/obj/tests/cross/criterion.o \
    $(BUILD)/cross/$(1)/obj/src/cores.o $(BUILD)/cross/$(1)/xxhash.o
	$(1)-linux-gnu-gcc -static $$^ -lm -lpthread -o $$@
$(BUILD)/cross/$(1)/test_ckf_kernels: $(BUILD)/cross/$(1)/obj/tests/support/kernel_portable.o
$(BUILD)/cross/$(1)/fuzz_%: $(BUILD)/cross/$(1)/obj/tests/fuzz/fuzz_%.o $(BUILD)/cross/$(1)/obj/tests/fuzz/driver.o \
    $(BUILD)/cross/$(1)/obj/src/cores.o
	$(1)-linux-gnu-gcc -static $$^ -o $$@
$(BUILD)/cross/$(1)/run_vectors: $(patsubst %,$(BUILD)/cross/$(1)/obj/%.o,$(CROSS_VECTORS) tests/cross/jansson src/cores) \
    $(BUILD)/cross/$(1)/xxhash.o
	$(1)-linux-gnu-gcc -static $$^ -lm -o $$@
cross-build: $$(call cross_programs,$(1))
endef
$(foreach machine,$(MACHINES),$(eval $(call CROSS_RULES,$(machine))))

$(BUILD)/cross/include/xxhash.h: | deps-check
	@mkdir -p $(@D)
	cp /usr/include/xxhash.h $@
endif

# The short form, part of "make check": the worst of machines and the two headers that compute.
CROSS_SHORT = $(patsubst %,$(BUILD)/cross/mips/%,$(filter test_hashfmt% test_engine_hash% test_ckf% fuzz_%,$(CROSS_UNITS)) run_vectors)
cross-short-build: $(CROSS_SHORT)
cross_run = scripts/run-tests --label '$(1) ' --through $(CROSS_QEMU_$(1)) --timeout 900 --jobs $(shell nproc) $(if $(TOTAL),--total $(TOTAL)) \
  --vectors '$(CROSS_JSON)' $(2)

cross-short: cross-short-build ## tests of hashfmt.h and ckf.h on an emulated big-endian 32-bit machine
	@$(call cross_run,mips,$(CROSS_SHORT))

cross-test: cross-build ## tests of all cores on all emulated machines
	@status=0; $(foreach machine,$(MACHINES),$(call cross_run,$(machine),$(call cross_programs,$(machine))) || status=1;) exit $$status

# ---- threads: the same stand-in, for the thread sanitizer leaves no room for what Criterion shares with its processes ----

THREADS := $(patsubst tests/unit/%.c,$(BUILD)/threads/%,$(wildcard tests/unit/test_*_threads.c))
$(BUILD)/threads/%: tests/unit/%.c tests/cross/criterion.c src/cores.c $(CORES) $(wildcard tests/unit/*.h) | deps-check
	@mkdir -p $(@D)
	clang -std=c11 -O1 -g -fsanitize=thread -D_GNU_SOURCE -I. -Itests -Itests/cross $(filter %.c,$^) -lpthread -o $@

threads: $(THREADS) ## tests named *_threads under the thread sanitizer, ROUNDS times
	@TSAN_OPTIONS=halt_on_error=1 scripts/run-tests --label 'tsan   ' --timeout 600 $(if $(TOTAL),--total $(TOTAL)) \
	  $(foreach round,$(shell seq $(or $(ROUNDS),1)),$^)

$(BUILD)/tests/python/%_pb2.py: proto/%.proto
	@mkdir -p $(@D)
	protoc -I $(<D) --python_out=$(@D) $<
$(BUILD)/tests/python/testing_pb2.py: tests/interop/grpc/testing.proto
	@mkdir -p $(@D)
	protoc -I $(<D) --python_out=$(@D) $<

tests: $(UNITS) $(RUN_VECTORS) $(FUZZERS) $(HELPERS) $(SIM) $(PB_PY) ## build all test programs

test: all tests ## unit tests and vectors, one build, no end-to-end tests
	scripts/run-tests --vectors '$(VECTORS)' $(UNITS) $(RUN_VECTORS) $(FUZZERS)

check: deps-check ## everything that must hold before a commit; ends with "N passed, N failed"
	+@BUILD='$(BUILD)' MAKE='$(MAKE)' scripts/check

check-all: deps-check-all ## check and all that takes longer: coverage, study, fuzzing, threads, foreign machines, valgrind
	+@BUILD='$(BUILD)' MAKE='$(MAKE)' scripts/check-all

conform: all tests ## the tests that carry ids of tests/conform, and the table of them, also in $(BUILD)/conform.md
	@rm -rf $(BUILD)/conform
	@KVRELAY_BIN='$(abspath $(BUILD))' KVRELAY_BUILD='$(abspath $(BUILD))' \
	  scripts/run-tests --results $(BUILD)/conform --total /dev/null \
	  $(patsubst tests/unit/%.c,$(BUILD)/tests/%,$(shell scripts/conform sources)); ran=$$?; \
	  scripts/conform table $(BUILD)/conform $(BUILD)/conform.md && exit $$ran

interop-dynamo: deps-interop ## the real relay of a Dynamo deployment and ours side by side (see tests/interop/README.md)
	+@$(MAKE) --no-print-directory -s BUILD='$(BUILD)' all $(PB_PY) $(BUILD)/tests/reported_load >&2 && BUILD='$(BUILD)' scripts/interop-dynamo

interop-grpc: deps-interop-grpc ## gRPC programs that others wrote on either side of ours (see tests/interop/README.md)
	+@$(MAKE) --no-print-directory -s BUILD='$(BUILD)' all $(PB_PY) $(BUILD)/tests/interop_server $(BUILD)/tests/interop_client >&2 && \
	  BUILD='$(BUILD)' scripts/interop-grpc

study: $(RUN_VECTORS) ## the accuracy study of ckf.h's search at full size, and its numbers
	$(RUN_VECTORS) --verbose --only study tests/vectors/ckf.json

fuzz: deps-check ## every fuzz target for FUZZ_SECONDS (60); FUZZ=NAME for one, MERGE=1 keeps what was found
	+@BUILD='$(BUILD)' MAKE='$(MAKE)' scripts/fuzz $(FUZZ)

coverage: deps-check ## lines and branches of the cores that tests reach; MISSING=1 names the others
	+@BUILD='$(BUILD)' MAKE='$(MAKE)' scripts/coverage $(if $(MISSING),--missing)

$(BUILD)/examples/%: examples/%.c $(CORES) examples/data_centre.h $(STAMP) | deps-check
	@mkdir -p $(@D)
	$(CC) -std=c99 $(CFLAGS) $(WARN) -I. $< $(LDFLAGS) -o $@
$(BUILD)/examples/%_cpp: examples/%.cpp $(CORES) examples/data_centre.h $(STAMP) | deps-check
	@mkdir -p $(@D)
	$(CXX) -std=c++11 $(CFLAGS) $(WARN_CXX) -I. $< $(LDFLAGS) -o $@
examples: $(EXAMPLES) ## build the examples for embedders into $(BUILD)/examples

demo: deps-build ## build, then show both sides at work on this machine
	+@$(MAKE) --no-print-directory -s all
	BUILD='$(BUILD)' tools/demo/run

# ---- measuring ----

$(BUILD)/bench/%: bench/%.c $(LIB) $(STAMP)
	@mkdir -p $(@D)
	@$(COMPILE) $(WARN) $(call own_compile,$<) -c $< -o $@.o
	@$(LINK) $@.o $(LIB) $(call own_link,$<) -lxxhash $(LIBS) -o $@

$(BUILD)/bench/peers/%: bench/peers/%.cc $(BUILD)/bench/peers/kvrelay.grpc.pb.o $(BUILD)/bench/peers/kvrelay.pb.o bench/peers/streams.h bench/bench.h \
  tests/interop/grpc/cpp/tls.h
	$(CXX) -std=c++17 $(CFLAGS) -Wall -Wextra -Wno-missing-field-initializers -D_GNU_SOURCE -I. -I$(BUILD)/bench/peers $(filter %.cc %.o,$^) $(LDFLAGS) \
	  -lgrpc++ -lgrpc -lgpr -lprotobuf -labsl_synchronization -lpthread -o $@
$(BUILD)/bench/peers/%.pb.o: $(BUILD)/bench/peers/%.pb.cc $(BUILD)/bench/peers/kvrelay.pb.h
	$(CXX) -std=c++17 $(CFLAGS) -I$(BUILD)/bench/peers -c $< -o $@
$(BUILD)/bench/peers/kvrelay.grpc.pb.cc $(BUILD)/bench/peers/kvrelay.pb.h: $(BUILD)/bench/peers/kvrelay.pb.cc ;
$(BUILD)/bench/peers/kvrelay.pb.cc: proto/kvrelay.proto
	@mkdir -p $(@D)
	protoc -I proto --cpp_out=$(@D) --grpc_out=$(@D) --plugin=protoc-gen-grpc=$$(command -v grpc_cpp_plugin) $<

bench: deps-bench ## run every bench/bench_*, one JSON line per figure; then gRPC beside C++ gRPC
	@$(MAKE) --no-print-directory -s BUILD=$(BUILD)/release CC=gcc CFLAGS='-O3 -g' benches bench-peers-grpc >&2
	@for program in $(BENCH_SRC:bench/%.c=$(BUILD)/release/bench/%); do $$program || exit 1; done
	@scripts/bench-grpc $(BUILD)/release

bench-grpc: deps-bench ## gRPC beside C++ gRPC: ratios, goals (see bench/README.md)
	@$(MAKE) --no-print-directory -s BUILD=$(BUILD)/release CC=gcc CFLAGS='-O3 -g' $(BUILD)/release/bench/bench_stream $(BUILD)/release/bench/bench_transport bench-peers-grpc >&2
	@scripts/bench-grpc $(BUILD)/release

bench-peers-grpc: $(BENCH_PEERS) $(BUILD)/kvrelayd

bench-peers: deps-bench ## ours beside the peer's on one core: ratios, goals (BENCH_PEER=PATH; see bench/README.md)
	@$(MAKE) --no-print-directory -s BUILD=$(BUILD)/release CC=gcc CFLAGS='-O3 -g' benches >&2
	@scripts/bench-peers $(BUILD)/release/bench

benches: $(BENCHES) ## build bench/bench_* into $(BUILD)/bench, with CFLAGS as they are

# ---- housekeeping ----

OUR_C = $(CORES) $(wildcard src/*.[ch] proto/*.[ch] transports/*.[ch] transports/*/*.[ch] tools/*/*.[ch] \
  tests/*/*.[ch] tests/cross/*/*.h bench/*.[ch] bench/*/*.[ch] bench/*/*.cc tests/interop/*/*/*.cc tests/interop/*/*/*.h examples/*.h examples/*.c examples/*.cpp)

format: deps-check ## clang-format all C files in place
	clang-format -i $(OUR_C)

function-size: deps-check ## functions beyond 60 lines or 15 branches that do not say why
	@scripts/function-size $(OUR_C)

format-check: deps-check ## list C files that clang-format would change
	scripts/check-format $(OUR_C)

firmware: deps-check ## compile the cores for small and foreign machines; UPDATE=1 accepts the new sizes
	scripts/firmware $(if $(UPDATE),--update)

toc: ## check that the contents list of each header equals its banners
	scripts/check-toc $(CORES)

deps-build deps-bench deps-check deps-check-all deps-interop deps-interop-grpc: deps-%:
	@scripts/deps $*

deps: ## install, or name, the Debian packages that build and tests need
	@scripts/deps check

clean: ## remove $(BUILD)
	rm -rf $(BUILD)

help: ## this list
	@sed -n 's/^\([a-z-]*\):.* ## \(.*\)/\1|\2/p' Makefile | awk -F'|' '{ printf "  make %-14s %s\n", $$1, $$2 }'

FORCE:
.PHONY: all tests sim fuzzers test check check-all conform interop-dynamo interop-grpc study fuzz coverage cross-build cross-short-build cross-test cross-short examples demo bench bench-grpc bench-peers bench-peers-grpc benches format format-check firmware toc function-size threads deps deps-build deps-bench deps-check deps-check-all deps-interop deps-interop-grpc clean help FORCE

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
