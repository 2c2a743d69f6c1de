/* SPDX-License-Identifier: Apache-2.0 */
/* kvrelayd - publishes the KV blocks of stock engines by the contract dynamo.kvrelay.v1. */
#include <errno.h>
#include <event2/event.h>
#include <getopt.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "front.h"
#include "log.h"
#include "plan.h"
#include "serve.h"
#include "timer.h"

#define DEFAULT_CONFIG "/etc/kvrelay/kvrelayd.yaml"
#define SHUTDOWN_GRACE_NS ((uint64_t)2000000000)

static const char usage[] =
    "Usage: kvrelayd [--config FILE] [options]\n"
    "       kvrelayd --check [FILE]\n"
    "\n"
    "Publishes which KV-cache blocks the engines of one data centre hold (gRPC package "
    "dynamo.kvrelay.v1).\n"
    "\n"
    "  --config FILE        configuration (default $KVRELAY_CONFIG, else " DEFAULT_CONFIG ")\n"
    "  --check [FILE]       check the configuration and its recordings, print what it means and "
    "the\n"
    "                       memory it takes at worst, and stop\n"
    "  --bind ADDRESS:PORT  gRPC listener, instead of relay.bind; port 0 takes a free one and logs "
    "it\n"
    "  --raw-bind ADDRESS:PORT\n"
    "                       listener of the raw transport, instead of $KVRELAY_RAW_BIND, else "
    "relay.raw_bind;\n"
    "                       when it reads as gRPC's does, one listener serves both\n"
    "  --health-bind ADDRESS:PORT\n"
    "                       a second listener that knows gRPC's health service alone, for probes\n"
    "  --sources-file FILE  serve only the namespaces of this JSON file, read again every second;\n"
    "                       $DYN_RELAY_CONNECTION_REVISION is the connectionRevision it must have\n"
    "  --log-level LEVEL    trace, debug, info, warn, error (default info)\n"
    "  --help, --version\n"
    "\n"
    "Exit codes: 0 stopped in order or check fine, 64 bad flags, 69 an address cannot be bound or "
    "a file cannot be read,\n"
    "70 internal failure, 71 the system refused something, 78 configuration not valid.\n"
    "SIGTERM or SIGINT stop in order; a second one stops at once.  SIGHUP reads the files of "
    "relay.tls again.\n";

/* Of the command line; NULL: not given. */
typedef struct flags {
  const char *path, *bind, *raw_bind, *health_bind, *sources;
  bool only_check;
} flags;

typedef struct daemon {
  struct event_base *base;
  struct event *term, *interrupt, *hangup;
  kvrelay_timer deadline;
  scope scope;
  serve serve;
  front front;
  int stops; /* signals to stop so far */
} daemon_;

static void on_stop(evutil_socket_t signal_number, short what, void *argument) {
  daemon_ *d = argument;
  (void)what;
  if (++d->stops > 1)
    _Exit(0);
  log_event(LOG_INFO, "stopping", "signal=%d", (int)signal_number);
}

static void on_hangup(evutil_socket_t signal_number, short what, void *argument) {
  daemon_ *d = argument;
  (void)signal_number;
  (void)what;
  log_event(LOG_INFO, "reload", "tls=%s", d->front.tls != NULL ? "yes" : "no");
  front_reload(&d->front);
}

static void on_deadline(void *daemon) { (void)daemon; /* waking the loop is all it is for */ }

/* As scope_open. */
static int open_scope(scope *s, const char *sources) {
  const char *connection = sources == NULL ? NULL : getenv("DYN_RELAY_CONNECTION_REVISION");
  if (connection == NULL || connection[0] != '\0')
    return scope_open(s, sources, connection, kvrelay_now_ns());
  memset(s, 0, sizeof *s);
  log_event(LOG_ERROR, "sources_file",
            "error=\"DYN_RELAY_CONNECTION_REVISION is empty: unset it, or name a revision\"");
  return 78;
}

static int check(const char *path, const char *sources) {
  int code = 0;
  scope selected;
  config *c = config_load(path, stderr, &code);
  if (c == NULL)
    return code;
  plan *p = plan_make(c, stderr);
  if (p == NULL) {
    config_free(c);
    return 71;
  }
  serve s;
  code = serve_reserve(&s, p);
  if (code == 0) {
    code = open_scope(&selected, sources);
    scope_close(&selected);
  }
  if (code == 0) {
    plan_print(p, stdout);
    printf("memory at worst %zu bytes\n%s: fine\n", s.worst_case_bytes, path);
  }
  serve_close(&s);
  plan_free(p);
  config_free(c);
  return code;
}

/* The earliest of all deadlines becomes the loop's timer. */
static void arm_deadline(daemon_ *d) {
  uint64_t at = serve_deadline_ns(&d->serve);
  const uint64_t file = d->stops == 0 ? scope_deadline_ns(&d->scope) : KVRELAY_TIME_NONE;
  at = file < at ? file : at;
  kvrelay_timer_set_at(&d->deadline, at);
}

/* 0 after an orderly stop, else an exit code after a log line. */
static int run(daemon_ *d) {
  bool stopping = false;
  for (;;) {
    uint64_t now = kvrelay_now_ns();
    if (d->stops != 0 && !stopping) {
      stopping = true;
      front_stop(&d->front, SHUTDOWN_GRACE_NS);
      kvrelay_relay_shutdown(&d->serve.relay, now);
    }
    serve_poll(&d->serve, now);
    if (!stopping && scope_poll(&d->scope, now))
      serve_scope_changed(&d->serve, now);
    /* Wakes the calls to which any of that has something to say. */
    kvrelay_relay_service_poll(d->front.relay, now);
    arm_deadline(d);
    int turned = front_turn(&d->front);
    if (turned == KVRELAY_TRANSPORT_CLOSED)
      return 0;
    if (turned < 0) {
      log_event(LOG_ERROR, "loop_failed", "error=\"%s\"", kvrelay_transport_strerror(turned));
      return 70;
    }
  }
}

static int open_signals(daemon_ *d) {
  signal(SIGPIPE, SIG_IGN);
  d->base = event_base_new();
  if (d->base == NULL)
    return 71;
  d->term = evsignal_new(d->base, SIGTERM, on_stop, d);
  d->interrupt = evsignal_new(d->base, SIGINT, on_stop, d);
  d->hangup = evsignal_new(d->base, SIGHUP, on_hangup, d); /* a closed terminal ends no relay */
  bool ok = d->term != NULL && d->interrupt != NULL && d->hangup != NULL &&
            event_add(d->term, NULL) == 0 && event_add(d->interrupt, NULL) == 0 &&
            event_add(d->hangup, NULL) == 0;
  return ok && kvrelay_timer_open(&d->deadline, d->base, on_deadline, d) == KVRELAY_TRANSPORT_OK
             ? 0
             : 71;
}

static void close_signals(daemon_ *d) {
  if (d->term != NULL)
    event_free(d->term);
  if (d->interrupt != NULL)
    event_free(d->interrupt);
  if (d->hangup != NULL)
    event_free(d->hangup);
  kvrelay_timer_close(&d->deadline);
  if (d->base != NULL)
    event_base_free(d->base);
}

static int open_all(daemon_ *d, const config *c, const plan *p, const flags *given) {
  int code = open_signals(d);
  if (code == 0)
    code = open_scope(&d->scope, given->sources);
  if (code == 0)
    code = serve_reserve(&d->serve, p);
  if (code == 0)
    code = serve_open(&d->serve, &d->scope);
  if (code == 0)
    code = front_open(&d->front, &d->serve.relay, d->base);
  if (code == 0 && c->relay.tls != NULL) {
    const kvrelay_tls_config tls = config_tls_of(c->relay.tls);
    code = front_secure(&d->front, &tls);
  }
  const char *bind = given->bind != NULL ? given->bind : c->relay.bind;
  const char *raw_bind = given->raw_bind != NULL ? given->raw_bind : c->relay.raw_bind;
  if (code == 0)
    code = front_listen(&d->front, bind, raw_bind);
  if (code == 0 && given->health_bind != NULL)
    code = front_listen_probes(&d->front, given->health_bind);
  if (code == 0 && bind == NULL && raw_bind == NULL)
    log_event(LOG_WARN, "no_listener",
              "note=\"no relay.bind, relay.raw_bind, --bind or --raw-bind: nobody can connect\"");
  return code == 0 ? serve_connect(&d->serve, d->base) : code;
}

static int serve_config(const flags *given) {
  int code = 0;
  daemon_ d;
  memset(&d, 0, sizeof d);
  config *c = config_load(given->path, stderr, &code);
  if (c == NULL)
    return code;
  plan *p = plan_make(c, stderr);
  code = p == NULL ? 71 : open_all(&d, c, p, given);
  if (code == 0) {
    front_ready(&d.front);
    log_event(LOG_INFO, "ready", "dc=%s pools=%u", c->relay.dc, d.serve.pools_count);
    code = run(&d);
    log_event(LOG_INFO, "stopped", "code=%d", code);
  } else if (code == 71) {
    log_event(LOG_ERROR, "not_started", "system=\"%s\"", strerror(errno));
  }
  front_close(&d.front);
  serve_close(&d.serve);
  scope_close(&d.scope);
  close_signals(&d);
  plan_free(p);
  config_free(c);
  return code;
}

static bool bind_valid(const char *flag, const char *address) {
  if (address == NULL || config_bind_valid(address))
    return true;
  fprintf(stderr, "kvrelayd: %s " CONFIG_BIND_FORM ", not '%s'\n", flag, address);
  return false;
}

/* -1, or the exit code when nothing more is to be done.  One case for each flag. */
static int parse_flags(int argc, char **argv, flags *given) {
  enum {
    OPT_CONFIG = 1,
    OPT_CHECK,
    OPT_BIND,
    OPT_RAW,
    OPT_HEALTH,
    OPT_SOURCES,
    OPT_LOG,
    OPT_HELP,
    OPT_VERSION
  };
  static const struct option options[] = {{"config", required_argument, NULL, OPT_CONFIG},
                                          {"check", no_argument, NULL, OPT_CHECK},
                                          {"bind", required_argument, NULL, OPT_BIND},
                                          {"raw-bind", required_argument, NULL, OPT_RAW},
                                          {"health-bind", required_argument, NULL, OPT_HEALTH},
                                          {"sources-file", required_argument, NULL, OPT_SOURCES},
                                          {"log-level", required_argument, NULL, OPT_LOG},
                                          {"help", no_argument, NULL, OPT_HELP},
                                          {"version", no_argument, NULL, OPT_VERSION},
                                          {NULL, 0, NULL, 0}};
  for (int o; (o = getopt_long(argc, argv, "", options, NULL)) != -1;) {
    switch (o) {
    case OPT_CONFIG:
      given->path = optarg;
      break;
    case OPT_CHECK:
      given->only_check = true;
      break;
    case OPT_BIND:
      given->bind = optarg;
      break;
    case OPT_RAW:
      given->raw_bind = optarg;
      break;
    case OPT_HEALTH:
      given->health_bind = optarg;
      break;
    case OPT_SOURCES:
      given->sources = optarg;
      break;
    case OPT_LOG:
      if (log_level_from_name(optarg) < 0) {
        fprintf(stderr, "kvrelayd: --log-level takes trace, debug, info, warn or error\n");
        return 64;
      }
      log_set_level(log_level_from_name(optarg));
      break;
    case OPT_HELP:
      fputs(usage, stdout);
      return 0;
    case OPT_VERSION:
      printf("kvrelayd %d.%d.%d, contract version %d\n", KVRELAY_VERSION_MAJOR,
             KVRELAY_VERSION_MINOR, KVRELAY_VERSION_PATCH, KVRELAY_WIRE_VERSION);
      return 0;
    default:
      fprintf(stderr, "kvrelayd: see --help\n");
      return 64;
    }
  }
  if (given->only_check && optind < argc)
    given->path = argv[optind++];
  if (optind < argc) {
    fprintf(stderr, "kvrelayd: unexpected argument '%s'; see --help\n", argv[optind]);
    return 64;
  }
  if (given->path == NULL)
    given->path = DEFAULT_CONFIG;
  return bind_valid("--bind", given->bind) &&
                 bind_valid("--raw-bind (KVRELAY_RAW_BIND)", given->raw_bind) &&
                 bind_valid("--health-bind", given->health_bind)
             ? -1
             : 64;
}

int main(int argc, char **argv) {
  flags given = {.path = getenv("KVRELAY_CONFIG"), .raw_bind = getenv("KVRELAY_RAW_BIND")};
  const int code = parse_flags(argc, argv, &given);
  if (code >= 0)
    return code;
  return given.only_check ? check(given.path, given.sources) : serve_config(&given);
}
