/* SPDX-License-Identifier: Apache-2.0 */
/* ckf_ingest.h: queues and workers in front of the lanes of a ckf_table. Needs ckf.h. */

/* ==== purpose ==== */
/*
 * Transports hand deltas and snapshots to bounded queues; workers, each the only writer of its
 * lanes, apply them while readers query the table. A lane that lags, overflows or contradicts
 * itself is retired on its own: it stops answering until it has a new lease and a new snapshot.
 * Whoever only wants a filter, or feeds lanes from one place, needs none of this and takes ckf.h
 * alone.
 *
 *   #include <stdlib.h>
 *   #define CKF_INGEST_IMPLEMENTATION
 *   #include "ckf_ingest.h"
 *
 *   int feed(ckf_ingest *in, const ckf_identity *identity, const ckf_lease *lease,
 *            const uint64_t *words, size_t word_count, const ckf_delta_out *delta,
 *            uint64_t now_ns) {
 *     const uint32_t worker = ckf_ingest_lane_worker(in, lease->physical_lane);
 *     ckf_ingest_ticket ticket;
 *     if (ckf_ingest_assign(in, identity, lease) != CKF_OK ||
 *         ckf_ingest_submit_snapshot(in, identity, lease, 0, words, word_count, &ticket,
 *                                    now_ns) != CKF_OK)
 *       return 1;
 *     while (ckf_ingest_poll(in, &ticket, now_ns) == 0)
 *       ckf_ingest_work(in, worker, now_ns, 64);
 *     return ticket.error != CKF_OK || ckf_ingest_submit_delta(in, delta, now_ns) != CKF_OK;
 *   }
 *
 *   int run(ckf_table *table, int (*serve)(ckf_ingest *in)) {
 *     const ckf_ingest_config cfg = ckf_ingest_config_default();
 *     const size_t len = ckf_ingest_mem_size(&cfg, table);
 *     void *const mem = malloc(len);
 *     ckf_ingest in;
 *     int rc = ckf_ingest_init(&in, &cfg, table, mem, len);
 *     if (rc == CKF_OK) {
 *       rc = serve(&in);
 *       ckf_ingest_close(&in);
 *       ckf_ingest_release(&in);
 *     }
 *     free(mem);
 *     return rc;
 *   }
 *
 * A plain include declares; CKF_INGEST_IMPLEMENTATION, in one unit, defines; CKF_INGEST_STATIC
 * makes a private copy of everything for this unit. ckf.h has to be defined somewhere as well.
 */

/* ==== contents ==== */
/*
 * conventions and trust
 * version
 * compiler shims
 * types
 * errors
 * pool
 * admission
 * workers
 * watchdog and reports
 * adapter
 */

/* ==== conventions and trust ==== */
/*
 * - A passive object: it starts no thread, reads no clock, allocates nothing. Memory comes from the
 *   caller (ckf_ingest_mem_size), the time is an argument (monotonic ns), threads are the caller's:
 *   each worker number is driven by one thread at a time with ckf_ingest_work, and one thread, or
 *   the same, calls ckf_ingest_tick.
 * - Threads meet in the hooks of the configuration: lock and unlock one of `workers` + 1 mutexes by
 *   number, wake the thread that has that number. Number `workers` belongs to the reports and to
 *   those who wait for tickets. At most two are held at once, the last one always second; wake is
 *   called with none. Without hooks one thread does everything.
 * - With hooks every function here may be called from any thread, except ckf_ingest_init, _close
 *   and _release, which belong to the owner, and an adapter, which belongs to one thread.
 * - Nothing waits. What takes its time is submitted with a ticket and polled.
 * - The ready bits of the table are the authority on what may be asked; reports of lanes are best
 *   effort, the one of a worker that failed is kept.
 * - What is in a delta or snapshot is not trusted: the lane checks all of it before its first
 *   write.
 * - Errors are CKF_OK, those of ckf.h, or a negative `enum ckf_ingest_err`.
 */

#if defined(CKF_INGEST_STATIC) && defined(CKF_INGEST_IMPLEMENTATION)
#error "ckf_ingest.h: define CKF_INGEST_STATIC or CKF_INGEST_IMPLEMENTATION, not both"
#endif

#ifndef CKF_INGEST_H_
#define CKF_INGEST_H_

#include "ckf.h"

/* ==== version ==== */

#define CKF_INGEST_VERSION_MAJOR 0
#define CKF_INGEST_VERSION_MINOR 1
#define CKF_INGEST_VERSION_PATCH 0

/* ==== compiler shims ==== */

#ifdef CKF_INGEST_STATIC
#define CKF_INGEST_MODE_STATIC_
#define CKF_INGEST_API static CKF_UNUSED_
#else
#define CKF_INGEST_API extern
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ==== types ==== */

#define CKF_INGEST_TIME_NONE UINT64_MAX
#define CKF_INGEST_MAX_WORKERS 256
#define CKF_INGEST_MAX_QUEUE 65536
#define CKF_INGEST_MAX_IMAGES (UINT32_C(1) << 30)
#define CKF_INGEST_IMAGES_OF_FORMAT UINT32_MAX /* as many as a lane has buckets */

/** How threads meet; see conventions. All three or none. */
typedef struct ckf_ingest_hooks {
  void (*lock)(void *user, uint32_t number);
  void (*unlock)(void *user, uint32_t number);
  void (*wake)(void *user, uint32_t number);
  void *user;
} ckf_ingest_hooks;

/** Limits of a pool of workers; start from ckf_ingest_config_default(). */
typedef struct ckf_ingest_config {
  uint32_t workers;            /* 1 .. 256; default 4 */
  uint32_t queue_cap;          /* 1 .. 65,536 commands per worker that wait; default 256 */
  uint64_t control_timeout_ns; /* 1 .. ; for snapshots and drains; default 10 s */
  uint32_t max_images;         /* 1 .. 2^30 images per lane that are not applied yet, 32 bytes each;
                                  default CKF_INGEST_IMAGES_OF_FORMAT */
  uint64_t max_age_ns;         /* 1 .. ; from submission to application of a delta; default 10 ms */
  ckf_ingest_hooks hooks;      /* default: none */
} ckf_ingest_config;

/** What a lane accepts. */
enum ckf_ingest_state {
  CKF_INGEST_UNASSIGNED = 0,
  CKF_INGEST_AWAITING_SNAPSHOT, /* snapshots */
  CKF_INGEST_ACTIVE,            /* deltas, drains, snapshots */
  CKF_INGEST_RETIRED            /* a new assignment */
};

/** Names a snapshot or drain until it is done. The caller's: neither moved nor freed before. */
typedef struct ckf_ingest_ticket {
  int error;                /* once done: CKF_OK, and `outcome` is not CKF_LANE_DEACTIVATED; or why
                               not, as at ckf_ingest_poll */
  ckf_lane_outcome outcome; /* of the lane; all 0 when it was not asked */
  uint64_t epoch_, deadline_ns_;
  uint32_t lane_, worker_, slot_;
  uint32_t state_;
} ckf_ingest_ticket;

/** One lane as it is at this moment. */
typedef struct ckf_ingest_lane_view {
  enum ckf_ingest_state state;
  bool ready;     /* what readers see */
  bool exhausted; /* fenced for good */
  uint32_t worker;
  uint32_t outstanding_deltas, outstanding_images; /* admitted, not applied or dropped yet */
  uint64_t deltas;                                 /* admitted so far */
  uint64_t applied_deltas, applied_images;
  uint64_t assignment_epoch; /* of the last assignment */
} ckf_ingest_lane_view;

/** Something went wrong with a lane, or with a worker and all its lanes. */
typedef struct ckf_ingest_report {
  int error; /* CKF_INGEST_ERR_LANE_FAULT, _AGE_EXCEEDED, _IMAGE_LIMIT, _SATURATED,
                _CONTROL_TIMEOUT, _EPOCH_EXHAUSTED, _WORKER_FAILED */
  uint32_t worker;
  uint32_t lanes;            /* bits of the lanes that it concerns */
  uint64_t assignment_epoch; /* of the lane; 0 for a worker */
  ckf_lane_outcome outcome;  /* _LANE_FAULT: the lane's verdict. _IMAGE_LIMIT: a = images that
                                would have been outstanding, b = limit. Its action says whether the
                                lane needs a new lease or only another snapshot */
} ckf_ingest_report;

/* Private parts, complete in the implementation. */
struct ckf_ingest_worker_;

typedef struct ckf_ingest_lane_ {
  ckf_lane lane; /* its worker's alone, but for the parts that never change */
  ckf_identity identity;
  ckf_lease lease;
  uint64_t epoch;      /* grows with each assignment; a command of another one is stale */
  uint64_t lane_epoch; /* the one that `lane` knows */
  uint64_t deltas, applied_deltas, applied_images;
  uint64_t taken_ns; /* submission of the delta that the worker is at */
  ckf_image *ring;
  uint32_t tail;
  uint32_t outstanding_deltas, outstanding_images;
  uint32_t first, last; /* slots of the deltas that wait */
  uint32_t worker;
  enum ckf_ingest_state state;
  bool claimed, taken, exhausted;
} ckf_ingest_lane_;

/** Queues and admission for all lanes of one table; private fields, size may change. */
typedef struct ckf_ingest {
  ckf_ingest_config cfg_;
  ckf_table *table_;
  struct ckf_ingest_worker_ *workers_;
  ckf_ingest_report *reports_;
  uint32_t report_first_, report_len_, report_cap_;
  uint64_t reports_lost_;
  ckf_ingest_lane_ lanes_[CKF_LANES];
} ckf_ingest;

enum ckf_ingest_event_kind { CKF_INGEST_STORED = 0, CKF_INGEST_REMOVED, CKF_INGEST_CLEARED };

/** One event for the producer of an adapter; arrays are lent for the call. */
typedef struct ckf_ingest_event {
  enum ckf_ingest_event_kind kind;
  ckf_member member;
  enum ckf_tier tier; /* not of a clear */
  enum ckf_domain domain;
  bool has_parent, has_start;
  uint64_t parent, start;    /* stored */
  const ckf_block *blocks;   /* stored */
  const uint64_t *externals; /* removed */
  size_t n;                  /* of blocks or externals */
} ckf_ingest_event;

/** A producer, its publisher and one lane in one process; private fields, size may change. */
typedef struct ckf_ingest_adapter {
  ckf_ingest *ingest_;
  ckf_producer *producer_;
  ckf_publisher publisher_;
  ckf_identity identity_;
  ckf_lease lease_;
  ckf_ingest_ticket ticket_;
  uint64_t now_ns_;
  int refusal_;
  uint32_t phase_;
} ckf_ingest_adapter;

/* ==== errors ==== */

/** Return codes, -5xx. */
enum ckf_ingest_err {
  /* configuration, in the order they are looked for */
  CKF_INGEST_ERR_WORKER_COUNT = -501,
  CKF_INGEST_ERR_QUEUE_CAPACITY = -502,
  CKF_INGEST_ERR_CONTROL_TIMEOUT_ZERO = -503,
  CKF_INGEST_ERR_IMAGE_BOUND = -504,
  CKF_INGEST_ERR_AGE_ZERO = -505,
  /* admission: nothing changed */
  CKF_INGEST_ERR_AWAITING_SNAPSHOT = -510,
  CKF_INGEST_ERR_LANE_UNASSIGNED = -511,
  CKF_INGEST_ERR_LANE_RETIRED = -512, /* or under another lease by now */
  CKF_INGEST_ERR_CLOSED = -513,
  /* the lane has been retired: it needs a new lease and a snapshot */
  CKF_INGEST_ERR_AGE_EXCEEDED = -520,
  CKF_INGEST_ERR_IMAGE_LIMIT = -521,
  CKF_INGEST_ERR_SATURATED = -522,
  CKF_INGEST_ERR_CONTROL_TIMEOUT = -523,
  CKF_INGEST_ERR_LANE_FAULT = -524, /* the lane's outcome says which and what next */
  /* for good */
  CKF_INGEST_ERR_WORKER_FAILED = -530,
  CKF_INGEST_ERR_EPOCH_EXHAUSTED = -531,
  /* adapter */
  CKF_INGEST_ERR_ADMISSION_CLOSED = -540,
  CKF_INGEST_ERR_PRODUCER_FORMAT = -541,
  CKF_INGEST_ERR_ASSIGNMENT_EPOCH = -542,
  CKF_INGEST_ERR_UNDER_WAY = -543 /* poll first */
};

/** A short sentence for people, also for errors of ckf.h; never NULL. */
CKF_INGEST_API const char *ckf_ingest_strerror(int err);
/** The protocol's name of an error (`Saturated`, `LaneRetired`), also for those of ckf.h; "" for
 * CKF_OK; never NULL. */
CKF_INGEST_API const char *ckf_ingest_errname(int err);
/** The kind of an error, as ckf_failure_of, also for those of ckf.h; CKF_INGEST_ERR_LANE_FAULT is
 * told by the outcome. */
CKF_INGEST_API enum ckf_failure ckf_ingest_failure_of(int err);
/** The protocol's name of a state. */
CKF_INGEST_API const char *ckf_ingest_state_name(enum ckf_ingest_state state);

/* ==== pool ==== */

/** The defaults in the comments of ckf_ingest_config; no hooks. */
CKF_INGEST_API ckf_ingest_config ckf_ingest_config_default(void);
/** Bytes for queues, images and reports in front of the lanes of a table, at any alignment; 0 when
 * the configuration is refused or the size cannot be represented. */
CKF_INGEST_API size_t ckf_ingest_mem_size(const ckf_ingest_config *cfg, const ckf_table *table);
/** Claims all lanes of a table and builds their queues in `mem`; table and memory are lent until
 * ckf_ingest_release. Errors in this order: CKF_ERR_ABI; those of the configuration, CKF_ERR_ARG
 * when some hooks are set and some are not; CKF_ERR_CAPACITY_OVERFLOW, more bytes than the machine
 * addresses; CKF_ERR_NOSPACE, `mem` is NULL or `len` too small; CKF_ERR_LANE_CLAIMED. Each leaves
 * the table as it was. */
CKF_INGEST_API CKF_MUST_USE int ckf_ingest_init_abi(ckf_ingest *in, size_t in_size,
                                                    const ckf_ingest_config *cfg, ckf_table *table,
                                                    void *mem, size_t len);
#define ckf_ingest_init(IN, CFG, TABLE, MEM, LEN)                                                  \
  ckf_ingest_init_abi((IN), sizeof(ckf_ingest), (CFG), (TABLE), (MEM), (LEN))
/** First half of the end, before the threads are joined: retires every lane, settles every ticket
 * that no worker is at, admits nothing more; each worker's next ckf_ingest_work says so. */
CKF_INGEST_API void ckf_ingest_close(ckf_ingest *in);
/** Second half, after the threads are gone: gives up the claims. Memory and table are free. */
CKF_INGEST_API void ckf_ingest_release(ckf_ingest *in);
/** The worker, 0 .. workers - 1, that a lane has for good in a pool of `workers`, 1 or more, in
 * front of a table of this consumer: for those who plan before there is a pool. */
CKF_INGEST_API uint32_t ckf_ingest_worker_of(uint64_t consumer_instance, uint32_t lane,
                                             uint32_t workers);
/** The worker of a lane, 0 .. 15, in this pool: the number for ckf_ingest_work. */
CKF_INGEST_API uint32_t ckf_ingest_lane_worker(const ckf_ingest *in, uint32_t lane);
/** CKF_ERR_INVALID_LANE, CKF_ERR_UNCONFIGURED_LANE: `view` is unchanged. */
CKF_INGEST_API CKF_MUST_USE int ckf_ingest_lane_get(ckf_ingest *in, uint32_t lane,
                                                    ckf_ingest_lane_view *view);

/* ==== admission ==== */
/*
 * The way of a lane: assign, submit_snapshot until one is installed, then deltas. `lane` is the
 * physical lane of the lease; one that is not there gives CKF_ERR_INVALID_LANE or
 * CKF_ERR_UNCONFIGURED_LANE everywhere.
 */

/** Takes a new lease, at once: not ready and awaiting a snapshot; what is queued under the former
 * lease does nothing any more. Errors of ckf_lane_assign: unchanged, even ready.
 * CKF_INGEST_ERR_EPOCH_EXHAUSTED: the lane is retired and stays so; CKF_INGEST_ERR_WORKER_FAILED,
 * _CLOSED: no more use. */
CKF_INGEST_API CKF_MUST_USE int ckf_ingest_assign(ckf_ingest *in, const ckf_identity *identity,
                                                  const ckf_lease *lease);
/** Withdraws readiness at once. Only a new lease brings the lane back; one without a lease, or none
 * at all, is left as it is. */
CKF_INGEST_API void ckf_ingest_retire(ckf_ingest *in, uint32_t lane);
/** Queues a delta, whose images are copied. The first that applies: _AWAITING_SNAPSHOT,
 * _LANE_UNASSIGNED, _LANE_RETIRED (state, then lease): refused; _AGE_EXCEEDED (the oldest
 * outstanding delta is too old), _IMAGE_LIMIT, _SATURATED (queue), _EPOCH_EXHAUSTED: refused, and
 * the lane is retired; _WORKER_FAILED: refused. */
CKF_INGEST_API CKF_MUST_USE int ckf_ingest_submit_delta(ckf_ingest *in, const ckf_delta_out *delta,
                                                        uint64_t now_ns);
/** Queues a snapshot. `words` and `ticket` are lent until ckf_ingest_poll says that it is done.
 * Refused, the ticket is not used: _LANE_UNASSIGNED, _LANE_RETIRED, _WORKER_FAILED;
 * CKF_ERR_NOSPACE: the queue is full, try again later. */
CKF_INGEST_API CKF_MUST_USE int
ckf_ingest_submit_snapshot(ckf_ingest *in, const ckf_identity *identity, const ckf_lease *lease,
                           uint64_t sequence, const uint64_t *words, size_t word_count,
                           ckf_ingest_ticket *ticket, uint64_t now_ns);
/** Queues the question whether everything up to `expected_sequence` is there, behind all deltas
 * submitted so far. As ckf_ingest_submit_snapshot, and _AWAITING_SNAPSHOT. */
CKF_INGEST_API CKF_MUST_USE int ckf_ingest_submit_drain(ckf_ingest *in, const ckf_lease *lease,
                                                        uint64_t expected_sequence,
                                                        ckf_ingest_ticket *ticket, uint64_t now_ns);
/** 1 = done, the fields of the ticket are set and nothing is lent any more; 0 = not yet. A lane
 * whose ticket is overdue is retired; while its worker is still at it, it is not done even so.
 * Errors in the ticket: _LANE_RETIRED (also meanwhile), _CONTROL_TIMEOUT, _LANE_FAULT,
 * _WORKER_FAILED. */
CKF_INGEST_API CKF_MUST_USE int ckf_ingest_poll(ckf_ingest *in, ckf_ingest_ticket *ticket,
                                                uint64_t now_ns);

/* ==== workers ==== */

/** Carries out up to `max_commands` commands of a worker, in order; returns how many, 0 = there is
 * none. A command that is overdue at `now_ns` retires its lane instead. CKF_ERR_ARG: no such
 * worker; CKF_INGEST_ERR_WORKER_FAILED, _CLOSED: nothing will come any more. */
CKF_INGEST_API ptrdiff_t ckf_ingest_work(ckf_ingest *in, uint32_t worker, uint64_t now_ns,
                                         size_t max_commands);
/** Says that the thread of a worker is gone, in whatever state it left its lanes, and holds no
 * lock. They are not ready from here on, for good; whoever waits for them is told, then it is
 * reported. */
CKF_INGEST_API void ckf_ingest_worker_failed(ckf_ingest *in, uint32_t worker);

/* ==== watchdog and reports ==== */

/** Retires lanes with an overdue delta or ticket. */
CKF_INGEST_API void ckf_ingest_tick(ckf_ingest *in, uint64_t now_ns);
/** When the next one will be overdue if nothing is done, CKF_INGEST_TIME_NONE = never: for an event
 * loop that asks again after each call. */
CKF_INGEST_API uint64_t ckf_ingest_deadline_ns(ckf_ingest *in);
/** How long a thread of its own sleeps between ticks: a quarter of max_age_ns, at least 100 us, at
 * most 10 ms. */
CKF_INGEST_API uint64_t ckf_ingest_interval_ns(const ckf_ingest *in);
/** Takes the oldest report: 1 = `out` is set, 0 = there is none. */
CKF_INGEST_API CKF_MUST_USE int ckf_ingest_report_next(ckf_ingest *in, ckf_ingest_report *out);
/** Reports of lanes that found no place: 2 * 16 reports are kept until somebody takes them, and
 * behind them one of each worker. */
CKF_INGEST_API uint64_t ckf_ingest_reports_lost(ckf_ingest *in);

/* ==== adapter ==== */
/*
 * A producer and a lane in one process. Events go through ckf_ingest_adapter_apply and nothing else
 * changes the producer. Deltas are submitted before the call returns; what waits for the worker
 * (start, drain, recover) is polled, with admission closed meanwhile.
 */

/** Starts with the lease given: assigns the lane and submits a snapshot of the producer, whose
 * words are lent until it is polled. The adapter must not move. CKF_INGEST_ERR_PRODUCER_FORMAT: the
 * producer's format is not that of `identity`; errors of ckf_ingest_assign and
 * ckf_ingest_submit_snapshot: admission is closed, ckf_ingest_adapter_recover may help. */
CKF_INGEST_API CKF_MUST_USE int ckf_ingest_adapter_start_abi(ckf_ingest_adapter *a, size_t a_size,
                                                             ckf_ingest *in, ckf_producer *producer,
                                                             const ckf_identity *identity,
                                                             const ckf_lease *lease,
                                                             uint64_t now_ns);
#define ckf_ingest_adapter_start(A, IN, PRODUCER, IDENTITY, LEASE, NOW_NS)                         \
  ckf_ingest_adapter_start_abi((A), sizeof(ckf_ingest_adapter), (IN), (PRODUCER), (IDENTITY),      \
                               (LEASE), (NOW_NS))
/** Outcome of what was started: 1 = done, admission is open; 0 = not yet; negative: the error of
 * the ticket, admission is closed. CKF_INGEST_ERR_ADMISSION_CLOSED: nothing is under way. */
CKF_INGEST_API CKF_MUST_USE int ckf_ingest_adapter_poll(ckf_ingest_adapter *a, uint64_t now_ns);
/** Applies an event, whose own verdict is in `out`; at the cadence publishes the window: 1 = a
 * delta was submitted, 0 = none was due. CKF_INGEST_ERR_ADMISSION_CLOSED: the event is refused;
 * CKF_ERR_ENQUEUE, CKF_ERR_FENCED: it counts, but the lane has to recover; CKF_ERR_INVARIANT:
 * admission is closed, rebuild the producer and start anew. */
CKF_INGEST_API CKF_MUST_USE int ckf_ingest_adapter_apply(ckf_ingest_adapter *a,
                                                         const ckf_ingest_event *event,
                                                         ckf_outcome *out, uint64_t now_ns);
/** Publishes what is pending; as ckf_ingest_adapter_apply. */
CKF_INGEST_API CKF_MUST_USE int ckf_ingest_adapter_flush(ckf_ingest_adapter *a, uint64_t now_ns);
/** Publishes what is pending and asks the lane whether it has everything; poll then. An error, also
 * from the poll, leaves admission closed, ckf_ingest_adapter_recover may help.
 * CKF_INGEST_ERR_ADMISSION_CLOSED also while something else is under way, which goes on: poll, and
 * ask again. */
CKF_INGEST_API CKF_MUST_USE int ckf_ingest_adapter_drain(ckf_ingest_adapter *a, uint64_t now_ns);
/** Starts anew with the next assignment epoch and a snapshot, whatever happened; poll then.
 * CKF_INGEST_ERR_UNDER_WAY: unchanged; CKF_INGEST_ERR_ASSIGNMENT_EPOCH: there is no next epoch; any
 * error leaves admission closed. */
CKF_INGEST_API CKF_MUST_USE int ckf_ingest_adapter_recover(ckf_ingest_adapter *a, uint64_t now_ns);
/** Sequence of the last delta submitted. */
CKF_INGEST_API uint64_t ckf_ingest_adapter_sequence(const ckf_ingest_adapter *a);
/** Why its publisher sends nothing, CKF_FENCE_NONE while it does. */
CKF_INGEST_API enum ckf_fence ckf_ingest_adapter_fence(const ckf_ingest_adapter *a);
/** Why the pool refused the last delta, CKF_OK if it did not. */
CKF_INGEST_API int ckf_ingest_adapter_refusal(const ckf_ingest_adapter *a);
/** What the lane said to the last snapshot or drain. */
CKF_INGEST_API const ckf_lane_outcome *ckf_ingest_adapter_outcome(const ckf_ingest_adapter *a);

#ifdef __cplusplus
}
#endif

#endif /* CKF_INGEST_H_ */

#if defined(CKF_INGEST_STATIC) && !defined(CKF_INGEST_MODE_STATIC_)
#error "ckf_ingest.h: CKF_INGEST_STATIC must be defined before the first inclusion"
#endif

#if defined(CKF_INGEST_IMPLEMENTATION) || defined(CKF_INGEST_STATIC)
#ifndef CKF_INGEST_IMPLEMENTATION_
#define CKF_INGEST_IMPLEMENTATION_

#ifdef __cplusplus
#ifdef __GNUC__ /* casts are those of C */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wold-style-cast"
#endif
extern "C" {
#endif

#define CKF_INGEST_NONE_ UINT32_MAX

enum { CKF_INGEST_DELTA_ = 0, CKF_INGEST_SNAPSHOT_, CKF_INGEST_DRAIN_ };
enum { CKF_INGEST_TICKET_QUEUED_ = 1, CKF_INGEST_TICKET_RUNNING_, CKF_INGEST_TICKET_DONE_ };

typedef struct ckf_ingest_command_ {
  ckf_identity identity;
  ckf_lease lease;
  uint64_t epoch;
  uint64_t base;     /* delta */
  uint64_t sequence; /* of delta or snapshot; what a drain expects */
  uint64_t submitted_ns;
  const uint64_t *words; /* snapshot */
  size_t n;              /* words, or images of a delta */
  ckf_ingest_ticket *ticket;
  uint32_t at;   /* of the images in the lane's ring */
  uint32_t next; /* delta: slot of the lane's next one */
  uint32_t lane;
  uint32_t kind;
} ckf_ingest_command_;

/* Guarded by its lock, together with all lanes that it has; `running` is its thread's while busy,
 * but for the ticket in it. */
typedef struct ckf_ingest_worker_ {
  ckf_ingest_command_ *queue;
  ckf_ingest_command_ running;
  uint32_t first, len;
  int ended; /* CKF_OK, or why nothing goes on */
  bool busy;
  bool news; /* somebody who waits has to be woken when the lock is free */
} ckf_ingest_worker_;

/* ==== errors (impl) ==== */

typedef struct ckf_ingest_error_row_ {
  int err;
  const char *name;
  const char *text;
} ckf_ingest_error_row_;

static const ckf_ingest_error_row_ ckf_ingest_error_rows_[] = {
    {CKF_INGEST_ERR_WORKER_COUNT, "InvalidWorkerCount", "workers is not in 1 .. 256"},
    {CKF_INGEST_ERR_QUEUE_CAPACITY, "InvalidQueueCapacity", "queue_cap is not in 1 .. 65,536"},
    {CKF_INGEST_ERR_CONTROL_TIMEOUT_ZERO, "InvalidControlTimeout", "control_timeout_ns is 0"},
    {CKF_INGEST_ERR_IMAGE_BOUND, "InvalidOutstandingImageBound", "max_images is not in 1 .. 2^30"},
    {CKF_INGEST_ERR_AGE_ZERO, "InvalidDirtyToAppliedAge", "max_age_ns is 0"},
    {CKF_INGEST_ERR_AWAITING_SNAPSHOT, "AwaitingSnapshot", "lane has no snapshot yet"},
    {CKF_INGEST_ERR_LANE_UNASSIGNED, "LaneUnassigned", "lane has no lease yet"},
    {CKF_INGEST_ERR_LANE_RETIRED, "LaneRetired", "lane is retired or under another lease"},
    {CKF_INGEST_ERR_CLOSED, "Closed", "workers are shut down"},
    {CKF_INGEST_ERR_AGE_EXCEEDED, "DirtyToAppliedAgeExceeded", "a delta waited too long"},
    {CKF_INGEST_ERR_IMAGE_LIMIT, "OutstandingImageLimit", "too many images wait"},
    {CKF_INGEST_ERR_SATURATED, "Saturated", "queue of the worker is full"},
    {CKF_INGEST_ERR_CONTROL_TIMEOUT, "ControlTimeout", "worker did not get to it in time"},
    {CKF_INGEST_ERR_LANE_FAULT, "LaneDeactivated", "lane refused what it was given"},
    {CKF_INGEST_ERR_WORKER_FAILED, "WorkerFailed", "worker of the lane is gone"},
    {CKF_INGEST_ERR_EPOCH_EXHAUSTED, "AdmissionEpochExhausted", "no number is left for this lane"},
    {CKF_INGEST_ERR_ADMISSION_CLOSED, "AdmissionClosed", "adapter has to recover first"},
    {CKF_INGEST_ERR_PRODUCER_FORMAT, "ProducerFormatMismatch", "producer has another format"},
    {CKF_INGEST_ERR_ASSIGNMENT_EPOCH, "AssignmentEpochExhausted", "no assignment epoch is left"},
    {CKF_INGEST_ERR_UNDER_WAY, "UnderWay", "what was started is not done yet"},
};

static const ckf_ingest_error_row_ *ckf_ingest_error_row_find_(int err) {
  size_t i;
  for (i = 0; i < sizeof ckf_ingest_error_rows_ / sizeof ckf_ingest_error_rows_[0]; i++) {
    if (ckf_ingest_error_rows_[i].err == err) {
      return &ckf_ingest_error_rows_[i];
    }
  }
  return NULL;
}

const char *ckf_ingest_strerror(int err) {
  const ckf_ingest_error_row_ *const row = ckf_ingest_error_row_find_(err);
  return row ? row->text : ckf_strerror(err);
}

const char *ckf_ingest_errname(int err) {
  const ckf_ingest_error_row_ *const row = ckf_ingest_error_row_find_(err);
  return row ? row->name : ckf_errname(err);
}

enum ckf_failure ckf_ingest_failure_of(int err) {
  switch (err) {
  case CKF_INGEST_ERR_IMAGE_LIMIT:
  case CKF_INGEST_ERR_SATURATED:
  case CKF_INGEST_ERR_LANE_FAULT:
    return CKF_FAILURE_CONSUMER_BEFORE_WRITE;
  case CKF_INGEST_ERR_AGE_EXCEEDED:
  case CKF_INGEST_ERR_CONTROL_TIMEOUT:
  case CKF_INGEST_ERR_WORKER_FAILED:
    return CKF_FAILURE_CONSUMER_WORKER_MID_APPLY;
  default:
    return ckf_failure_of(err);
  }
}

const char *ckf_ingest_state_name(enum ckf_ingest_state state) {
  switch (state) {
  case CKF_INGEST_UNASSIGNED:
    return "Unassigned";
  case CKF_INGEST_AWAITING_SNAPSHOT:
    return "AwaitingSnapshot";
  case CKF_INGEST_ACTIVE:
    return "Active";
  case CKF_INGEST_RETIRED:
    return "Retired";
  }
  return "Unknown";
}

/* ==== pool (impl) ==== */

ckf_ingest_config ckf_ingest_config_default(void) {
  ckf_ingest_config cfg;
  CKF_MEMSET(&cfg, 0, sizeof cfg);
  cfg.workers = 4;
  cfg.queue_cap = 256;
  cfg.control_timeout_ns = UINT64_C(10000000000);
  cfg.max_images = CKF_INGEST_IMAGES_OF_FORMAT;
  cfg.max_age_ns = UINT64_C(10000000);
  return cfg;
}

static int ckf_ingest_config_check_(const ckf_ingest_config *cfg) {
  const ckf_ingest_hooks *const hooks = &cfg->hooks;
  if (cfg->workers == 0 || cfg->workers > CKF_INGEST_MAX_WORKERS) {
    return CKF_INGEST_ERR_WORKER_COUNT;
  }
  if (cfg->queue_cap == 0 || cfg->queue_cap > CKF_INGEST_MAX_QUEUE) {
    return CKF_INGEST_ERR_QUEUE_CAPACITY;
  }
  if (cfg->control_timeout_ns == 0) {
    return CKF_INGEST_ERR_CONTROL_TIMEOUT_ZERO;
  }
  if (cfg->max_images == 0 ||
      (cfg->max_images > CKF_INGEST_MAX_IMAGES && cfg->max_images != CKF_INGEST_IMAGES_OF_FORMAT)) {
    return CKF_INGEST_ERR_IMAGE_BOUND;
  }
  if (cfg->max_age_ns == 0) {
    return CKF_INGEST_ERR_AGE_ZERO;
  }
  return !hooks->lock == !hooks->unlock && !hooks->lock == !hooks->wake ? CKF_OK : CKF_ERR_ARG;
}

static uint32_t ckf_ingest_max_images_(const ckf_ingest_config *cfg, const ckf_table *table) {
  return cfg->max_images == CKF_INGEST_IMAGES_OF_FORMAT
             ? (uint32_t)ckf_table_manifest(table)->format.bucket_count
             : cfg->max_images;
}

static uint32_t ckf_ingest_report_cap_(const ckf_ingest_config *cfg) {
  return 2 * CKF_LANES + cfg->workers;
}

#define CKF_INGEST_ALIGN_ 8u

/* Cuts `n` objects off a block, or only counts when there is none. */
static void *ckf_ingest_cut_(uint8_t *base, uint64_t *used, uint64_t n, size_t size) {
  void *const at = base ? base + *used : NULL;
  *used += (n * size + CKF_INGEST_ALIGN_ - 1) / CKF_INGEST_ALIGN_ * CKF_INGEST_ALIGN_;
  return at;
}

/* The parts of the memory block, in order; without `base` only their size. */
static uint64_t ckf_ingest_layout_(ckf_ingest *in, const ckf_ingest_config *cfg,
                                   const ckf_table *table, uint8_t *base) {
  const uint32_t configured = ckf_table_manifest(table)->configured;
  const uint64_t ring_cap = UINT64_C(2) * ckf_ingest_max_images_(cfg, table);
  uint64_t used = 0;
  uint32_t i;
  ckf_ingest_worker_ *const workers =
      (ckf_ingest_worker_ *)ckf_ingest_cut_(base, &used, cfg->workers, sizeof(ckf_ingest_worker_));
  void *const reports =
      ckf_ingest_cut_(base, &used, ckf_ingest_report_cap_(cfg), sizeof(ckf_ingest_report));
  if (base) {
    in->workers_ = workers;
    in->reports_ = (ckf_ingest_report *)reports;
    CKF_MEMSET(workers, 0, cfg->workers * sizeof *workers);
  }
  for (i = 0; i < cfg->workers; i++) {
    void *const queue = ckf_ingest_cut_(base, &used, cfg->queue_cap, sizeof(ckf_ingest_command_));
    if (base) {
      workers[i].queue = (ckf_ingest_command_ *)queue;
    }
  }
  for (i = 0; i < CKF_LANES; i++) {
    if (configured >> i & 1) {
      void *const ring = ckf_ingest_cut_(base, &used, ring_cap, sizeof(ckf_image));
      if (base) {
        in->lanes_[i].ring = (ckf_image *)ring;
      }
    }
  }
  return used;
}

size_t ckf_ingest_mem_size(const ckf_ingest_config *cfg, const ckf_table *table) {
  uint64_t bytes;
  if (ckf_ingest_config_check_(cfg) != CKF_OK) {
    return 0;
  }
  bytes = ckf_ingest_layout_(NULL, cfg, table, NULL) + CKF_INGEST_ALIGN_ - 1;
  return bytes <= PTRDIFF_MAX ? (size_t)bytes : 0;
}

uint32_t ckf_ingest_worker_of(uint64_t consumer_instance, uint32_t lane, uint32_t workers) {
  const uint64_t step = UINT64_C(0x9E3779B97F4A7C15);
  uint64_t state = (consumer_instance ^ lane * step) - step; /* a draw adds the step first */
  return (uint32_t)(ckf_rng_draw(&state) % workers);
}

static int ckf_ingest_claim_(ckf_ingest *in, uint32_t number) {
  const ckf_manifest *const m = ckf_table_manifest(in->table_);
  ckf_ingest_lane_ *const lane = &in->lanes_[number];
  const int rc = ckf_lane_claim(&lane->lane, in->table_, number);
  lane->claimed = rc == CKF_OK;
  lane->worker = ckf_ingest_worker_of(m->consumer_instance, number, in->cfg_.workers);
  lane->first = CKF_INGEST_NONE_;
  return rc;
}

int ckf_ingest_init_abi(ckf_ingest *in, size_t in_size, const ckf_ingest_config *cfg,
                        ckf_table *table, void *mem, size_t len) {
  const int checked = ckf_ingest_config_check_(cfg);
  const size_t need = ckf_ingest_mem_size(cfg, table);
  uint32_t i;
  int rc = CKF_OK;
  if (in_size != sizeof *in) {
    return CKF_ERR_ABI;
  }
  if (checked != CKF_OK) {
    return checked;
  }
  if (need == 0) {
    return CKF_ERR_CAPACITY_OVERFLOW;
  }
  if (!mem || len < need) {
    return CKF_ERR_NOSPACE;
  }
  CKF_MEMSET(in, 0, sizeof *in);
  in->cfg_ = *cfg;
  in->cfg_.max_images = ckf_ingest_max_images_(cfg, table);
  in->table_ = table;
  in->report_cap_ = ckf_ingest_report_cap_(cfg);
  (void)ckf_ingest_layout_(in, cfg, table,
                           (uint8_t *)mem +
                               (CKF_INGEST_ALIGN_ - (uintptr_t)mem % CKF_INGEST_ALIGN_) %
                                   CKF_INGEST_ALIGN_);
  for (i = 0; i < CKF_LANES && rc == CKF_OK; i++) {
    if (ckf_table_manifest(table)->configured >> i & 1) {
      rc = ckf_ingest_claim_(in, i);
    }
  }
  if (rc != CKF_OK) {
    ckf_ingest_release(in);
  }
  return rc;
}

void ckf_ingest_release(ckf_ingest *in) {
  uint32_t i;
  for (i = 0; i < CKF_LANES; i++) {
    if (in->lanes_[i].claimed) {
      ckf_lane_release(&in->lanes_[i].lane);
      in->lanes_[i].claimed = false;
    }
  }
}

/* ---- locks ---- */

static ckf_ingest_worker_ *ckf_ingest_enter_(ckf_ingest *in, uint32_t worker) {
  if (in->cfg_.hooks.lock) {
    in->cfg_.hooks.lock(in->cfg_.hooks.user, worker);
  }
  return &in->workers_[worker];
}

static void ckf_ingest_wake_(const ckf_ingest *in, uint32_t number) {
  if (in->cfg_.hooks.wake) {
    in->cfg_.hooks.wake(in->cfg_.hooks.user, number);
  }
}

static void ckf_ingest_leave_(ckf_ingest *in, ckf_ingest_worker_ *w) {
  const bool news = w->news;
  w->news = false;
  if (in->cfg_.hooks.unlock) {
    in->cfg_.hooks.unlock(in->cfg_.hooks.user, (uint32_t)(w - in->workers_));
  }
  if (news) {
    ckf_ingest_wake_(in, in->cfg_.workers);
  }
}

static void ckf_ingest_reports_enter_(ckf_ingest *in) {
  if (in->cfg_.hooks.lock) {
    in->cfg_.hooks.lock(in->cfg_.hooks.user, in->cfg_.workers);
  }
}

static void ckf_ingest_reports_leave_(ckf_ingest *in) {
  if (in->cfg_.hooks.unlock) {
    in->cfg_.hooks.unlock(in->cfg_.hooks.user, in->cfg_.workers);
  }
}

/* ---- lanes, under the lock of their worker ---- */

static int ckf_ingest_lane_check_(const ckf_ingest *in, uint32_t lane) {
  if (lane >= CKF_LANES) {
    return CKF_ERR_INVALID_LANE;
  }
  return in->lanes_[lane].claimed ? CKF_OK : CKF_ERR_UNCONFIGURED_LANE;
}

/* Does a command of this epoch still count? */
static bool ckf_ingest_current_(const ckf_ingest_worker_ *w, const ckf_ingest_lane_ *lane,
                                uint64_t epoch) {
  return w->ended == CKF_OK && lane->epoch == epoch &&
         (lane->state == CKF_INGEST_AWAITING_SNAPSHOT || lane->state == CKF_INGEST_ACTIVE);
}

static bool ckf_ingest_lane_has_(const ckf_ingest *in, uint32_t lane, uint32_t worker) {
  return in->lanes_[lane].claimed && in->lanes_[lane].worker == worker;
}

/* The last places are left to workers: each fails once, and that must not drown among lanes that
 * are retired again and again. */
static void ckf_ingest_report_(ckf_ingest *in, ckf_ingest_worker_ *w,
                               const ckf_ingest_report *report) {
  ckf_ingest_reports_enter_(in);
  if (report->error != CKF_INGEST_ERR_WORKER_FAILED && in->report_len_ >= 2 * CKF_LANES) {
    in->reports_lost_++;
  } else {
    in->reports_[(in->report_first_ + in->report_len_++) % in->report_cap_] = *report;
  }
  ckf_ingest_reports_leave_(in);
  w->news = true;
}

static void ckf_ingest_report_lane_(ckf_ingest *in, ckf_ingest_worker_ *w, uint32_t number,
                                    int error, const ckf_lane_outcome *outcome) {
  const ckf_ingest_lane_ *const lane = &in->lanes_[number];
  ckf_ingest_report report;
  CKF_MEMSET(&report, 0, sizeof report);
  report.error = error;
  report.worker = lane->worker;
  report.lanes = UINT32_C(1) << number;
  report.assignment_epoch = lane->lease.assignment_epoch;
  report.outcome.action = CKF_ACTION_DEACTIVATE_AND_SNAPSHOT;
  if (outcome) {
    report.outcome = *outcome;
  }
  ckf_ingest_report_(in, w, &report);
}

/* Readers stop coming before anything else changes. What the worker is at goes on, without effect:
 * it sets no ready bit once the state is another one. */
static void ckf_ingest_retire_(ckf_ingest *in, ckf_ingest_worker_ *w, uint32_t number, int error,
                               const ckf_lane_outcome *outcome) {
  ckf_table_withdraw(in->table_, UINT32_C(1) << number);
  in->lanes_[number].state = CKF_INGEST_RETIRED;
  w->news = true; /* its tickets are done */
  if (error != CKF_OK) {
    ckf_ingest_report_lane_(in, w, number, error, outcome);
  }
}

/* Submission of the oldest delta that is not applied; false = there is none. */
static bool ckf_ingest_oldest_(const ckf_ingest_worker_ *w, const ckf_ingest_lane_ *lane,
                               uint64_t *submitted_ns) {
  if (!lane->taken && lane->first == CKF_INGEST_NONE_) {
    return false;
  }
  *submitted_ns = lane->taken ? lane->taken_ns : w->queue[lane->first].submitted_ns;
  return true;
}

/* Times come from several threads and may be a little out of order. */
static bool ckf_ingest_too_old_(const ckf_ingest *in, uint64_t submitted_ns, uint64_t now_ns) {
  return now_ns > submitted_ns && now_ns - submitted_ns >= in->cfg_.max_age_ns;
}

static uint64_t ckf_ingest_after_(uint64_t now_ns, uint64_t span_ns) {
  return span_ns > CKF_INGEST_TIME_NONE - now_ns ? CKF_INGEST_TIME_NONE : now_ns + span_ns;
}

/* ---- tickets, under the lock of their worker ---- */

static void ckf_ingest_settle_(ckf_ingest_worker_ *w, ckf_ingest_ticket *ticket, int error) {
  if (ticket->error == CKF_OK) { /* else a timeout came first */
    ticket->error = error;
  }
  ticket->state_ = CKF_INGEST_TICKET_DONE_;
  w->news = true;
}

/* Takes a waiting ticket off its command, so that nothing points to it any more. */
static void ckf_ingest_detach_(ckf_ingest_worker_ *w, ckf_ingest_ticket *ticket, int error) {
  w->queue[ticket->slot_].ticket = NULL;
  ckf_ingest_settle_(w, ticket, error);
}

/* Ends what is overdue, and what waits for a lane that has been retired or assigned anew. */
static void ckf_ingest_review_(ckf_ingest *in, ckf_ingest_worker_ *w, ckf_ingest_ticket *ticket,
                               uint64_t now_ns) {
  const ckf_ingest_lane_ *const lane = &in->lanes_[ticket->lane_];
  if (ckf_ingest_current_(w, lane, ticket->epoch_) && now_ns >= ticket->deadline_ns_) {
    ticket->error = CKF_INGEST_ERR_CONTROL_TIMEOUT;
    ckf_ingest_retire_(in, w, ticket->lane_, CKF_INGEST_ERR_CONTROL_TIMEOUT, NULL);
  }
  if (ticket->state_ == CKF_INGEST_TICKET_QUEUED_ &&
      !ckf_ingest_current_(w, lane, ticket->epoch_)) {
    ckf_ingest_detach_(w, ticket, CKF_INGEST_ERR_LANE_RETIRED);
  }
}

/* Calls nothing any more: the queue is dropped, and whoever waits is told why. */
static void ckf_ingest_end_(ckf_ingest *in, ckf_ingest_worker_ *w, int why, int error) {
  uint32_t i;
  w->ended = why;
  for (i = 0; i < w->len; i++) {
    ckf_ingest_command_ *const c = &w->queue[(w->first + i) % in->cfg_.queue_cap];
    if (c->ticket) {
      ckf_ingest_detach_(w, c->ticket, error);
    }
  }
  w->len = 0;
  for (i = 0; i < CKF_LANES; i++) {
    if (ckf_ingest_lane_has_(in, i, (uint32_t)(w - in->workers_))) {
      in->lanes_[i].first = CKF_INGEST_NONE_;
      in->lanes_[i].taken = false;
      in->lanes_[i].outstanding_deltas = in->lanes_[i].outstanding_images = 0;
    }
  }
}

void ckf_ingest_close(ckf_ingest *in) {
  uint32_t i, lane;
  for (i = 0; i < in->cfg_.workers; i++) {
    ckf_ingest_worker_ *const w = ckf_ingest_enter_(in, i);
    for (lane = 0; lane < CKF_LANES; lane++) {
      if (ckf_ingest_lane_has_(in, lane, i)) {
        ckf_ingest_retire_(in, w, lane, CKF_OK, NULL);
      }
    }
    if (w->ended == CKF_OK) {
      ckf_ingest_end_(in, w, CKF_INGEST_ERR_CLOSED, CKF_INGEST_ERR_LANE_RETIRED);
    }
    ckf_ingest_leave_(in, w);
    ckf_ingest_wake_(in, i);
  }
}

uint32_t ckf_ingest_lane_worker(const ckf_ingest *in, uint32_t lane) {
  return ckf_ingest_worker_of(ckf_table_manifest(in->table_)->consumer_instance, lane,
                              in->cfg_.workers);
}

int ckf_ingest_lane_get(ckf_ingest *in, uint32_t lane, ckf_ingest_lane_view *view) {
  const int rc = ckf_ingest_lane_check_(in, lane);
  const ckf_ingest_lane_ *const l = &in->lanes_[rc == CKF_OK ? lane : 0];
  ckf_ingest_worker_ *w;
  if (rc != CKF_OK) {
    return rc;
  }
  w = ckf_ingest_enter_(in, l->worker);
  view->state = l->state;
  view->ready = ckf_table_ready(in->table_) >> lane & 1;
  view->exhausted = l->exhausted;
  view->worker = l->worker;
  view->outstanding_deltas = l->outstanding_deltas;
  view->outstanding_images = l->outstanding_images;
  view->deltas = l->deltas;
  view->applied_deltas = l->applied_deltas;
  view->applied_images = l->applied_images;
  view->assignment_epoch = l->lease.assignment_epoch;
  ckf_ingest_leave_(in, w);
  return CKF_OK;
}

/* ==== admission (impl) ==== */

static bool ckf_ingest_lease_equal_(const ckf_lease *x, const ckf_lease *y) {
  return x->consumer_instance == y->consumer_instance && x->physical_lane == y->physical_lane &&
         x->assignment_epoch == y->assignment_epoch;
}

/* The lane itself hears of its lease when its worker comes to the first command under it, so an
 * assignment waits for nobody. */
static int ckf_ingest_assign_(ckf_ingest *in, ckf_ingest_worker_ *w, const ckf_identity *identity,
                              const ckf_lease *lease) {
  ckf_ingest_lane_ *const lane = &in->lanes_[lease->physical_lane];
  const int rc = ckf_lane_assignable(&lane->lane, identity, lease);
  if (rc != CKF_OK) {
    return rc;
  }
  if (lane->epoch > 0 && lease->assignment_epoch <= lane->lease.assignment_epoch) {
    return CKF_ERR_STALE_EPOCH;
  }
  if (w->ended != CKF_OK) {
    return w->ended;
  }
  if (lane->epoch == UINT64_MAX && !lane->exhausted) {
    lane->exhausted = true;
    ckf_ingest_retire_(in, w, lease->physical_lane, CKF_INGEST_ERR_EPOCH_EXHAUSTED, NULL);
  }
  if (lane->exhausted) {
    return CKF_INGEST_ERR_EPOCH_EXHAUSTED;
  }
  ckf_ingest_retire_(in, w, lease->physical_lane, CKF_OK, NULL);
  lane->epoch++;
  lane->identity = *identity;
  lane->lease = *lease;
  lane->state = CKF_INGEST_AWAITING_SNAPSHOT;
  return CKF_OK;
}

int ckf_ingest_assign(ckf_ingest *in, const ckf_identity *identity, const ckf_lease *lease) {
  int rc = ckf_ingest_lane_check_(in, lease->physical_lane);
  if (rc == CKF_OK) {
    ckf_ingest_worker_ *const w = ckf_ingest_enter_(in, in->lanes_[lease->physical_lane].worker);
    rc = ckf_ingest_assign_(in, w, identity, lease);
    ckf_ingest_leave_(in, w);
  }
  return rc;
}

void ckf_ingest_retire(ckf_ingest *in, uint32_t lane) {
  if (ckf_ingest_lane_check_(in, lane) == CKF_OK) {
    ckf_ingest_worker_ *const w = ckf_ingest_enter_(in, in->lanes_[lane].worker);
    if (in->lanes_[lane].state != CKF_INGEST_UNASSIGNED) {
      ckf_ingest_retire_(in, w, lane, CKF_OK, NULL);
    }
    ckf_ingest_leave_(in, w);
  }
}

/* State, then lease. */
static int ckf_ingest_admit_(const ckf_ingest_lane_ *lane, const ckf_lease *lease,
                             bool awaiting_too) {
  switch (lane->state) {
  case CKF_INGEST_UNASSIGNED:
    return CKF_INGEST_ERR_LANE_UNASSIGNED;
  case CKF_INGEST_RETIRED:
    return CKF_INGEST_ERR_LANE_RETIRED;
  case CKF_INGEST_AWAITING_SNAPSHOT:
    if (!awaiting_too) {
      return CKF_INGEST_ERR_AWAITING_SNAPSHOT;
    }
    break;
  case CKF_INGEST_ACTIVE:
    break;
  }
  if (!ckf_ingest_lease_equal_(lease, &lane->lease)) {
    return CKF_INGEST_ERR_LANE_RETIRED;
  }
  return CKF_OK;
}

/* The next free slot of the queue, with what all commands have; there is room. */
static ckf_ingest_command_ *ckf_ingest_push_(ckf_ingest *in, ckf_ingest_worker_ *w, uint32_t kind,
                                             const ckf_identity *identity, const ckf_lease *lease,
                                             uint64_t now_ns) {
  ckf_ingest_command_ *const c = &w->queue[(w->first + w->len++) % in->cfg_.queue_cap];
  CKF_MEMSET(c, 0, sizeof *c);
  c->kind = kind;
  c->lane = lease->physical_lane;
  c->identity = *identity;
  c->lease = *lease;
  c->epoch = in->lanes_[c->lane].epoch;
  c->submitted_ns = now_ns;
  c->next = CKF_INGEST_NONE_;
  return c;
}

/* Room for n images in one piece, which a ring of twice the limit always has: they are taken and
 * given back in order, and what one round cannot use at its end is less than the limit. It starts
 * over when it is empty, so that a lane that keeps up touches little memory. */
static uint32_t ckf_ingest_ring_take_(ckf_ingest_lane_ *lane, uint32_t cap, uint32_t n) {
  uint32_t at;
  if (lane->outstanding_images == 0 || cap - lane->tail < n) {
    lane->tail = 0;
  }
  at = lane->tail;
  lane->tail += n;
  lane->outstanding_images += n;
  return at;
}

static void ckf_ingest_queue_delta_(ckf_ingest *in, ckf_ingest_worker_ *w,
                                    const ckf_delta_out *delta, uint64_t now_ns) {
  ckf_ingest_lane_ *const lane = &in->lanes_[delta->lease->physical_lane];
  const size_t n = delta->batch.image_count;
  ckf_ingest_command_ *const c =
      ckf_ingest_push_(in, w, CKF_INGEST_DELTA_, delta->identity, delta->lease, now_ns);
  const uint32_t slot = (uint32_t)(c - w->queue);
  size_t i;
  c->base = delta->base;
  c->sequence = delta->sequence;
  c->n = n;
  c->at = ckf_ingest_ring_take_(lane, 2 * in->cfg_.max_images, (uint32_t)n);
  for (i = 0; i < n; i++) {
    lane->ring[c->at + i] = ckf_batch_image(&delta->batch, i);
  }
  if (lane->first == CKF_INGEST_NONE_) {
    lane->first = slot;
  } else {
    w->queue[lane->last].next = slot;
  }
  lane->last = slot;
  lane->outstanding_deltas++;
  lane->deltas++;
}

static int ckf_ingest_submit_delta_(ckf_ingest *in, ckf_ingest_worker_ *w,
                                    const ckf_delta_out *delta, uint64_t now_ns) {
  const uint32_t number = delta->lease->physical_lane;
  ckf_ingest_lane_ *const lane = &in->lanes_[number];
  const int rc = ckf_ingest_admit_(lane, delta->lease, false);
  const uint32_t limit = in->cfg_.max_images;
  uint64_t oldest_ns;
  if (rc != CKF_OK) {
    return rc;
  }
  if (ckf_ingest_oldest_(w, lane, &oldest_ns) && ckf_ingest_too_old_(in, oldest_ns, now_ns)) {
    ckf_ingest_retire_(in, w, number, CKF_INGEST_ERR_AGE_EXCEEDED, NULL);
    return CKF_INGEST_ERR_AGE_EXCEEDED;
  }
  if (delta->batch.image_count > limit - lane->outstanding_images) {
    ckf_lane_outcome out;
    CKF_MEMSET(&out, 0, sizeof out);
    out.action = CKF_ACTION_DEACTIVATE_AND_SNAPSHOT;
    out.a = (uint64_t)lane->outstanding_images + delta->batch.image_count;
    out.b = limit;
    ckf_ingest_retire_(in, w, number, CKF_INGEST_ERR_IMAGE_LIMIT, &out);
    return CKF_INGEST_ERR_IMAGE_LIMIT;
  }
  if (w->len == in->cfg_.queue_cap) {
    ckf_ingest_retire_(in, w, number, CKF_INGEST_ERR_SATURATED, NULL);
    return CKF_INGEST_ERR_SATURATED;
  }
  if (w->ended != CKF_OK) {
    return w->ended;
  }
  if (lane->deltas == UINT64_MAX) {
    lane->exhausted = true;
    ckf_ingest_retire_(in, w, number, CKF_INGEST_ERR_EPOCH_EXHAUSTED, NULL);
    return CKF_INGEST_ERR_EPOCH_EXHAUSTED;
  }
  ckf_ingest_queue_delta_(in, w, delta, now_ns);
  return CKF_OK;
}

int ckf_ingest_submit_delta(ckf_ingest *in, const ckf_delta_out *delta, uint64_t now_ns) {
  int rc = ckf_ingest_lane_check_(in, delta->lease->physical_lane);
  if (rc == CKF_OK) {
    const uint32_t worker = in->lanes_[delta->lease->physical_lane].worker;
    ckf_ingest_worker_ *const w = ckf_ingest_enter_(in, worker);
    rc = ckf_ingest_submit_delta_(in, w, delta, now_ns);
    ckf_ingest_leave_(in, w);
    if (rc == CKF_OK) {
      ckf_ingest_wake_(in, worker);
    }
  }
  return rc;
}

/* What a snapshot and a drain have in common. */
static int ckf_ingest_submit_(ckf_ingest *in, uint32_t kind, const ckf_identity *identity,
                              const ckf_lease *lease, uint64_t sequence, const uint64_t *words,
                              size_t word_count, ckf_ingest_ticket *ticket, uint64_t now_ns) {
  int rc = ckf_ingest_lane_check_(in, lease->physical_lane);
  const ckf_ingest_lane_ *const lane = &in->lanes_[rc == CKF_OK ? lease->physical_lane : 0];
  ckf_ingest_worker_ *w;
  if (rc != CKF_OK) {
    return rc;
  }
  w = ckf_ingest_enter_(in, lane->worker);
  rc = ckf_ingest_admit_(lane, lease, kind == CKF_INGEST_SNAPSHOT_);
  if (rc == CKF_OK && w->ended != CKF_OK) {
    rc = w->ended;
  }
  if (rc == CKF_OK && w->len == in->cfg_.queue_cap) {
    rc = CKF_ERR_NOSPACE;
  }
  if (rc == CKF_OK) {
    ckf_ingest_command_ *const c =
        ckf_ingest_push_(in, w, kind, identity ? identity : &lane->identity, lease, now_ns);
    c->sequence = sequence;
    c->words = words;
    c->n = word_count;
    c->ticket = ticket;
    CKF_MEMSET(ticket, 0, sizeof *ticket);
    ticket->epoch_ = c->epoch;
    ticket->deadline_ns_ = ckf_ingest_after_(now_ns, in->cfg_.control_timeout_ns);
    ticket->lane_ = c->lane;
    ticket->worker_ = lane->worker;
    ticket->slot_ = (uint32_t)(c - w->queue);
    ticket->state_ = CKF_INGEST_TICKET_QUEUED_;
  }
  ckf_ingest_leave_(in, w);
  if (rc == CKF_OK) {
    ckf_ingest_wake_(in, lane->worker);
  }
  return rc;
}

int ckf_ingest_submit_snapshot(ckf_ingest *in, const ckf_identity *identity, const ckf_lease *lease,
                               uint64_t sequence, const uint64_t *words, size_t word_count,
                               ckf_ingest_ticket *ticket, uint64_t now_ns) {
  return ckf_ingest_submit_(in, CKF_INGEST_SNAPSHOT_, identity, lease, sequence, words, word_count,
                            ticket, now_ns);
}

int ckf_ingest_submit_drain(ckf_ingest *in, const ckf_lease *lease, uint64_t expected_sequence,
                            ckf_ingest_ticket *ticket, uint64_t now_ns) {
  return ckf_ingest_submit_(in, CKF_INGEST_DRAIN_, NULL, lease, expected_sequence, NULL, 0, ticket,
                            now_ns);
}

int ckf_ingest_poll(ckf_ingest *in, ckf_ingest_ticket *ticket, uint64_t now_ns) {
  ckf_ingest_worker_ *const w = ckf_ingest_enter_(in, ticket->worker_);
  bool done;
  if (ticket->state_ != CKF_INGEST_TICKET_DONE_) {
    ckf_ingest_review_(in, w, ticket, now_ns);
  }
  done = ticket->state_ == CKF_INGEST_TICKET_DONE_;
  ckf_ingest_leave_(in, w);
  return done;
}

/* ==== workers (impl) ==== */

/* Moves the oldest command to `running`; `*go` = it still counts. */
static bool ckf_ingest_take_(ckf_ingest *in, ckf_ingest_worker_ *w, uint64_t now_ns, bool *go) {
  ckf_ingest_command_ *const c = &w->running;
  ckf_ingest_lane_ *lane;
  if (w->len == 0) {
    return false;
  }
  *c = w->queue[w->first];
  w->first = (w->first + 1) % in->cfg_.queue_cap;
  w->len--;
  w->busy = true;
  lane = &in->lanes_[c->lane];
  if (c->kind == CKF_INGEST_DELTA_) {
    lane->first = c->next;
    lane->taken = true;
    lane->taken_ns = c->submitted_ns;
    if (ckf_ingest_current_(w, lane, c->epoch) &&
        ckf_ingest_too_old_(in, c->submitted_ns, now_ns)) {
      ckf_ingest_retire_(in, w, c->lane, CKF_INGEST_ERR_AGE_EXCEEDED, NULL);
    }
  } else if (c->ticket) {
    c->ticket->state_ = CKF_INGEST_TICKET_RUNNING_;
    ckf_ingest_review_(in, w, c->ticket, now_ns);
  }
  *go = ckf_ingest_current_(w, lane, c->epoch);
  if (*go && lane->lane_epoch != lane->epoch) {
    *go = ckf_lane_assign(&lane->lane, &lane->identity, &lane->lease) == CKF_OK;
    lane->lane_epoch = lane->epoch;
  }
  return true;
}

/* Without the lock: the lane, its part of the ring and the words of a snapshot are the worker's. */
static ckf_lane_outcome ckf_ingest_run_(ckf_ingest_lane_ *lane, const ckf_ingest_command_ *c) {
  switch (c->kind) {
  case CKF_INGEST_SNAPSHOT_:
    return ckf_lane_stage(&lane->lane, &c->identity, &c->lease, c->sequence, c->words, c->n);
  case CKF_INGEST_DRAIN_:
    return ckf_lane_drain(&lane->lane, &c->lease, c->sequence);
  default:
    return ckf_lane_apply_delta(&lane->lane, &c->identity, &c->lease, c->base, c->sequence,
                                &lane->ring[c->at], c->n);
  }
}

/* What the lane said takes effect, unless the lane was retired meanwhile. */
static void ckf_ingest_effect_(ckf_ingest *in, ckf_ingest_worker_ *w, const ckf_ingest_command_ *c,
                               const ckf_lane_outcome *out) {
  ckf_ingest_lane_ *const lane = &in->lanes_[c->lane];
  if (out->result == CKF_LANE_SNAPSHOT_INSTALLED) {
    ckf_lane_activate(&lane->lane);
    lane->state = CKF_INGEST_ACTIVE;
  } else if (out->result == CKF_LANE_DELTA_APPLIED) {
    lane->applied_deltas++;
    lane->applied_images += c->n;
  } else if (out->result == CKF_LANE_DEACTIVATED) {
    if (out->action == CKF_ACTION_RETRY_SNAPSHOT) {
      ckf_ingest_report_lane_(in, w, c->lane, CKF_INGEST_ERR_LANE_FAULT, out);
    } else {
      ckf_ingest_retire_(in, w, c->lane, CKF_INGEST_ERR_LANE_FAULT, out);
    }
  }
}

static void ckf_ingest_finish_(ckf_ingest *in, ckf_ingest_worker_ *w, const ckf_lane_outcome *out) {
  const ckf_ingest_command_ *const c = &w->running;
  ckf_ingest_lane_ *const lane = &in->lanes_[c->lane];
  const bool counts = out && ckf_ingest_current_(w, lane, c->epoch);
  if (c->kind == CKF_INGEST_DELTA_ && w->ended == CKF_OK) {
    lane->taken = false;
    lane->outstanding_images -= (uint32_t)c->n;
    lane->outstanding_deltas--;
  }
  if (counts) {
    ckf_ingest_effect_(in, w, c, out);
  }
  if (c->ticket && !counts) {
    ckf_ingest_settle_(w, c->ticket, CKF_INGEST_ERR_LANE_RETIRED);
  } else if (c->ticket) {
    const bool refused = out->result == CKF_LANE_DEACTIVATED;
    c->ticket->outcome = *out;
    ckf_ingest_settle_(w, c->ticket, refused ? (int)CKF_INGEST_ERR_LANE_FAULT : (int)CKF_OK);
  }
  w->busy = false;
}

ptrdiff_t ckf_ingest_work(ckf_ingest *in, uint32_t worker, uint64_t now_ns, size_t max_commands) {
  ckf_ingest_worker_ *w;
  size_t done = 0;
  bool go = false;
  int ended;
  if (worker >= in->cfg_.workers) {
    return CKF_ERR_ARG;
  }
  w = ckf_ingest_enter_(in, worker);
  while (done < max_commands && ckf_ingest_take_(in, w, now_ns, &go)) {
    ckf_lane_outcome out;
    if (go) {
      ckf_ingest_leave_(in, w);
      out = ckf_ingest_run_(&in->lanes_[w->running.lane], &w->running);
      (void)ckf_ingest_enter_(in, worker);
    }
    ckf_ingest_finish_(in, w, go ? &out : NULL);
    done++;
  }
  ended = w->ended;
  ckf_ingest_leave_(in, w);
  return done == 0 && ended != CKF_OK ? ended : (ptrdiff_t)done;
}

void ckf_ingest_worker_failed(ckf_ingest *in, uint32_t worker) {
  ckf_ingest_report report;
  ckf_ingest_worker_ *w;
  uint32_t i;
  if (worker >= in->cfg_.workers) {
    return;
  }
  CKF_MEMSET(&report, 0, sizeof report);
  report.error = CKF_INGEST_ERR_WORKER_FAILED;
  report.worker = worker;
  report.outcome.action = CKF_ACTION_DEACTIVATE_AND_SNAPSHOT;
  for (i = 0; i < CKF_LANES; i++) {
    report.lanes |= (uint32_t)ckf_ingest_lane_has_(in, i, worker) << i;
  }
  w = ckf_ingest_enter_(in, worker);
  if (w->ended != CKF_INGEST_ERR_WORKER_FAILED) {
    ckf_table_withdraw(in->table_, report.lanes);
    ckf_ingest_end_(in, w, CKF_INGEST_ERR_WORKER_FAILED, CKF_INGEST_ERR_WORKER_FAILED);
    if (w->busy && w->running.ticket) {
      ckf_ingest_settle_(w, w->running.ticket, CKF_INGEST_ERR_WORKER_FAILED);
      w->running.ticket = NULL;
    }
    ckf_ingest_report_(in, w, &report);
  }
  ckf_ingest_leave_(in, w);
}

/* ==== watchdog and reports (impl) ==== */

/* Each command of a worker that has a ticket, the running one first: start with `*i` = 0. */
static ckf_ingest_ticket *ckf_ingest_ticket_next_(const ckf_ingest *in, ckf_ingest_worker_ *w,
                                                  uint32_t *i) {
  while (*i <= w->len) {
    const uint32_t at = (*i)++;
    ckf_ingest_ticket *ticket = NULL;
    if (at > 0) {
      ticket = w->queue[(w->first + at - 1) % in->cfg_.queue_cap].ticket;
    } else if (w->busy) {
      ticket = w->running.ticket;
    }
    if (ticket) {
      return ticket;
    }
  }
  return NULL;
}

void ckf_ingest_tick(ckf_ingest *in, uint64_t now_ns) {
  uint32_t worker, i;
  for (worker = 0; worker < in->cfg_.workers; worker++) {
    ckf_ingest_worker_ *const w = ckf_ingest_enter_(in, worker);
    ckf_ingest_ticket *ticket;
    for (i = 0; i < CKF_LANES; i++) {
      const ckf_ingest_lane_ *const lane = &in->lanes_[i];
      uint64_t oldest_ns;
      if (ckf_ingest_lane_has_(in, i, worker) && lane->state == CKF_INGEST_ACTIVE &&
          ckf_ingest_oldest_(w, lane, &oldest_ns) && ckf_ingest_too_old_(in, oldest_ns, now_ns)) {
        ckf_ingest_retire_(in, w, i, CKF_INGEST_ERR_AGE_EXCEEDED, NULL);
      }
    }
    i = 0;
    while ((ticket = ckf_ingest_ticket_next_(in, w, &i)) != NULL) {
      ckf_ingest_review_(in, w, ticket, now_ns);
    }
    ckf_ingest_leave_(in, w);
  }
}

uint64_t ckf_ingest_deadline_ns(ckf_ingest *in) {
  uint64_t deadline_ns = CKF_INGEST_TIME_NONE;
  uint32_t worker, i;
  for (worker = 0; worker < in->cfg_.workers; worker++) {
    ckf_ingest_worker_ *const w = ckf_ingest_enter_(in, worker);
    ckf_ingest_ticket *ticket;
    for (i = 0; i < CKF_LANES; i++) {
      const ckf_ingest_lane_ *const lane = &in->lanes_[i];
      uint64_t at_ns;
      if (ckf_ingest_lane_has_(in, i, worker) && lane->state == CKF_INGEST_ACTIVE &&
          ckf_ingest_oldest_(w, lane, &at_ns)) {
        at_ns = ckf_ingest_after_(at_ns, in->cfg_.max_age_ns);
        deadline_ns = at_ns < deadline_ns ? at_ns : deadline_ns;
      }
    }
    i = 0;
    while ((ticket = ckf_ingest_ticket_next_(in, w, &i)) != NULL) {
      if (ckf_ingest_current_(w, &in->lanes_[ticket->lane_], ticket->epoch_) &&
          ticket->deadline_ns_ < deadline_ns) {
        deadline_ns = ticket->deadline_ns_;
      }
    }
    ckf_ingest_leave_(in, w);
  }
  return deadline_ns;
}

uint64_t ckf_ingest_interval_ns(const ckf_ingest *in) {
  const uint64_t quarter = in->cfg_.max_age_ns / 4, least = 100000, most = 10000000;
  return quarter < least ? least : quarter > most ? most : quarter;
}

int ckf_ingest_report_next(ckf_ingest *in, ckf_ingest_report *out) {
  int there;
  ckf_ingest_reports_enter_(in);
  there = in->report_len_ > 0;
  if (there) {
    *out = in->reports_[in->report_first_];
    in->report_first_ = (in->report_first_ + 1) % in->report_cap_;
    in->report_len_--;
  }
  ckf_ingest_reports_leave_(in);
  return there;
}

uint64_t ckf_ingest_reports_lost(ckf_ingest *in) {
  uint64_t lost;
  ckf_ingest_reports_enter_(in);
  lost = in->reports_lost_;
  ckf_ingest_reports_leave_(in);
  return lost;
}

/* ==== adapter (impl) ==== */

enum { CKF_INGEST_SHUT_ = 0, CKF_INGEST_OPEN_, CKF_INGEST_INSTALLING_, CKF_INGEST_DRAINING_ };

static bool ckf_ingest_sink_(void *user, const ckf_delta_out *delta) {
  ckf_ingest_adapter *const a = (ckf_ingest_adapter *)user;
  a->refusal_ = ckf_ingest_submit_delta(a->ingest_, delta, a->now_ns_);
  return a->refusal_ == CKF_OK;
}

/* Assign, snapshot behind a barrier, install. The words are lent as they are: nothing changes them
 * while admission is closed. */
static int ckf_ingest_adapter_install_(ckf_ingest_adapter *a, uint64_t now_ns) {
  ckf_batch tail;
  uint64_t sequence;
  int pending, rc;
  a->phase_ = CKF_INGEST_SHUT_;
  a->now_ns_ = now_ns;
  rc = ckf_ingest_assign(a->ingest_, &a->identity_, &a->lease_);
  if (rc != CKF_OK) {
    return rc;
  }
  pending = ckf_producer_drain(a->producer_, &tail);
  if (pending < 0) {
    return pending;
  }
  rc = ckf_publisher_snapshot(&a->publisher_, &a->lease_, pending ? &tail : NULL, &sequence);
  if (rc != CKF_OK) {
    return rc;
  }
  rc = ckf_ingest_submit_snapshot(a->ingest_, &a->identity_, &a->lease_, sequence,
                                  ckf_producer_words(a->producer_),
                                  (size_t)a->identity_.format.bucket_count, &a->ticket_, now_ns);
  a->phase_ = rc == CKF_OK ? CKF_INGEST_INSTALLING_ : CKF_INGEST_SHUT_;
  return rc;
}

int ckf_ingest_adapter_start_abi(ckf_ingest_adapter *a, size_t a_size, ckf_ingest *in,
                                 ckf_producer *producer, const ckf_identity *identity,
                                 const ckf_lease *lease, uint64_t now_ns) {
  const ckf_format *const format = ckf_producer_format(producer);
  int rc;
  if (a_size != sizeof *a) {
    return CKF_ERR_ABI;
  }
  if (format->seed != identity->format.seed ||
      format->bucket_count != identity->format.bucket_count) {
    return CKF_INGEST_ERR_PRODUCER_FORMAT;
  }
  CKF_MEMSET(a, 0, sizeof *a);
  a->ingest_ = in;
  a->producer_ = producer;
  a->identity_ = *identity;
  a->lease_ = *lease;
  rc = ckf_publisher_init(&a->publisher_, identity, 0, ckf_ingest_sink_, a);
  return rc == CKF_OK ? ckf_ingest_adapter_install_(a, now_ns) : rc;
}

int ckf_ingest_adapter_poll(ckf_ingest_adapter *a, uint64_t now_ns) {
  const uint32_t phase = a->phase_;
  enum ckf_lane_result want = CKF_LANE_SNAPSHOT_INSTALLED;
  if (phase == CKF_INGEST_OPEN_) {
    return 1;
  }
  if (phase == CKF_INGEST_SHUT_) {
    return CKF_INGEST_ERR_ADMISSION_CLOSED;
  }
  if (!ckf_ingest_poll(a->ingest_, &a->ticket_, now_ns)) {
    return 0;
  }
  if (phase == CKF_INGEST_DRAINING_) {
    want = CKF_LANE_DRAIN_ACKNOWLEDGED;
  }
  a->phase_ = CKF_INGEST_SHUT_;
  if (a->ticket_.error != CKF_OK) {
    return a->ticket_.error;
  }
  if (a->ticket_.outcome.result != want) {
    return CKF_INGEST_ERR_LANE_FAULT;
  }
  a->phase_ = CKF_INGEST_OPEN_;
  return 1;
}

int ckf_ingest_adapter_flush(ckf_ingest_adapter *a, uint64_t now_ns) {
  ckf_batch batch;
  int rc;
  if (a->phase_ != CKF_INGEST_OPEN_) {
    return CKF_INGEST_ERR_ADMISSION_CLOSED;
  }
  a->now_ns_ = now_ns;
  rc = ckf_producer_drain(a->producer_, &batch);
  return rc > 0 ? ckf_publisher_publish(&a->publisher_, &batch) : rc;
}

int ckf_ingest_adapter_apply(ckf_ingest_adapter *a, const ckf_ingest_event *event, ckf_outcome *out,
                             uint64_t now_ns) {
  CKF_MEMSET(out, 0, sizeof *out);
  if (a->phase_ != CKF_INGEST_OPEN_) {
    return CKF_INGEST_ERR_ADMISSION_CLOSED;
  }
  switch (event->kind) {
  case CKF_INGEST_STORED:
    (void)ckf_producer_stored(a->producer_, &event->member, event->tier, event->domain,
                              event->has_parent, event->parent, event->has_start, event->start,
                              event->blocks, event->n, out);
    break;
  case CKF_INGEST_REMOVED:
    (void)ckf_producer_removed(a->producer_, &event->member, event->tier, event->domain,
                               event->externals, event->n, out);
    break;
  case CKF_INGEST_CLEARED:
    (void)ckf_producer_cleared(a->producer_, &event->member, event->domain, out);
    break;
  }
  if (out->error == CKF_ERR_INVARIANT) {
    a->phase_ = CKF_INGEST_SHUT_;
    return CKF_ERR_INVARIANT;
  }
  return out->boundary ? ckf_ingest_adapter_flush(a, now_ns) : 0;
}

int ckf_ingest_adapter_drain(ckf_ingest_adapter *a, uint64_t now_ns) {
  ckf_lease lease;
  uint64_t expected;
  int rc = ckf_ingest_adapter_flush(a, now_ns);
  if (rc < 0) {
    if (a->phase_ == CKF_INGEST_OPEN_) {
      a->phase_ = CKF_INGEST_SHUT_;
    }
    return rc;
  }
  a->phase_ = CKF_INGEST_SHUT_;
  if (!ckf_publisher_drain_marker(&a->publisher_, &lease, &expected)) {
    return CKF_INGEST_ERR_ADMISSION_CLOSED;
  }
  rc = ckf_ingest_submit_drain(a->ingest_, &lease, expected, &a->ticket_, now_ns);
  a->phase_ = rc == CKF_OK ? CKF_INGEST_DRAINING_ : CKF_INGEST_SHUT_;
  return rc;
}

int ckf_ingest_adapter_recover(ckf_ingest_adapter *a, uint64_t now_ns) {
  if (a->phase_ == CKF_INGEST_INSTALLING_ || a->phase_ == CKF_INGEST_DRAINING_) {
    return CKF_INGEST_ERR_UNDER_WAY;
  }
  a->phase_ = CKF_INGEST_SHUT_;
  if (a->lease_.assignment_epoch == UINT64_MAX) {
    return CKF_INGEST_ERR_ASSIGNMENT_EPOCH;
  }
  a->lease_.assignment_epoch++;
  ckf_publisher_retire(&a->publisher_);
  return ckf_ingest_adapter_install_(a, now_ns);
}

uint64_t ckf_ingest_adapter_sequence(const ckf_ingest_adapter *a) {
  return ckf_publisher_last_sequence(&a->publisher_);
}

enum ckf_fence ckf_ingest_adapter_fence(const ckf_ingest_adapter *a) {
  return ckf_publisher_fence(&a->publisher_);
}

int ckf_ingest_adapter_refusal(const ckf_ingest_adapter *a) { return a->refusal_; }

const ckf_lane_outcome *ckf_ingest_adapter_outcome(const ckf_ingest_adapter *a) {
  return &a->ticket_.outcome;
}

#ifdef __cplusplus
}
#ifdef __GNUC__
#pragma GCC diagnostic pop
#endif
#endif

#endif /* CKF_INGEST_IMPLEMENTATION_ */
#endif /* CKF_INGEST_IMPLEMENTATION || CKF_INGEST_STATIC */
