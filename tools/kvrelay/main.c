/* SPDX-License-Identifier: Apache-2.0 */
/* kvrelay - shows and questions any relay of the contract dynamo.kvrelay.v1. */
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "show.h"
#include "wire.h"

/* clang-format off: a line here is a line there, of at most 80 columns */
static const char usage[] =
    "Usage: kvrelay COMMAND TARGET [options]\n"
    "\n"
    "  info     who is there: contract version, relay identity, round trip\n"
    "  catalog  which pools it publishes, with the models they serve\n"
    "  query    how many leading blocks of a prompt each pool holds\n"
    "  watch    the filter stream of its pools, a line per frame\n"
    "  conform  whether it keeps the contract: the conformance scenarios that need\n"
    "           nothing but a connection, each passed, failed with the reason, or\n"
    "           not applicable\n"
    "\n"
    "TARGET is host:port of a relay, unix:PATH, or either behind raw:// for the raw\n"
    "transport.\n"
    "\n"
    "  --model NAME         query: model id or alias\n"
    "  --tokens FILE        query: token ids, separated by white space or commas, or\n"
    "                       a JSON list; - = standard input\n"
    "  --token-ids LIST     query: the same on the command line, with ranges:\n"
    "                       1,2,100-195\n"
    "  --adapter NAME       query: LoRA adapter of that model\n"
    "  --namespace NAME     query: cache namespace (what engines call cache salt)\n"
    "  --pool NAME          watch, conform: one pool only,\n"
    "                       namespace/component/endpoint, or the identity that\n"
    "                       catalog --json shows\n"
    "  --watch              catalog: go on, a catalog per change\n"
    "  --count N            watch, catalog --watch: stop after N frames or catalogs;\n"
    "                       0 = never (default)\n"
    "  --timeout SECONDS    wait this long for a first answer (default 10); conform:\n"
    "                       for each try of a scenario (default 15), of which there\n"
    "                       are up to three while pools of the relay come and go\n"
    "  --subscriber-id ID   how the relay sees us (default kvrelay-cli); not for info\n"
    "  --tls                over TLS; the certificate has to name the target's host\n"
    "  --tls-ca FILE        and to come from these authorities (default: the system's)\n"
    "  --tls-cert FILE      with --tls-key FILE: show this certificate\n"
    "  --tls-server-name NAME\n"
    "                       the name in the certificate, when it is not the target's\n"
    "                       host; each of these four means --tls\n"
    "  --json               one JSON object a line instead of tables; identities are\n"
    "                       hexadecimal strings, other numbers beyond 2^63-1\n"
    "                       decimal strings\n"
    "  --help, --version\n"
    "\n"
    "watch and catalog --watch go on when the relay is lost: they say so on standard\n"
    "error, try again at growing intervals of up to 30 s, and say when it is back.\n"
    "\n"
    "conform does no harm to a relay in use: it sends small requests, opens at most\n"
    "four streams at a time, reads the snapshot of the smallest pool a few times, and\n"
    "never fills a limit.  A missing heartbeat it tells from 12 seconds on.\n"
    "\n"
    "Exit codes: 0 yes, 1 no, 2 cannot be decided, 64 wrong usage, 69 nobody answers,\n"
    "71 lack of memory or another resource here, or the output cannot be written, 76\n"
    "the other side speaks another contract.\n"
    "query: 0 when a pool holds the prompt's first block, or more; 1 when none does,\n"
    "the prompt is shorter than a block, or no pool serves the model; 2 when a pool\n"
    "has not answered and no other holds a block, when no pool of the model can be\n"
    "used, and when its name has two meanings.\n"
    "watch, conform: 1 when the relay has no pool of that name.\n"
    "conform: 1 when a scenario failed.\n";
/* clang-format on */

/* The numbers of the options. */
enum {
  MODEL = 1,
  TOKENS,
  TOKEN_IDS,
  ADAPTER,
  NAMESPACE,
  POOL,
  WATCH,
  COUNT,
  TIMEOUT,
  SUBSCRIBER,
  JSON,
  TLS,
  TLS_CA,
  TLS_CERT,
  TLS_KEY,
  TLS_NAME
};

/* Options that every command takes. */
#define EVERYWHERE                                                                                 \
  (1u << TIMEOUT | 1u << JSON | 1u << TLS | 1u << TLS_CA | 1u << TLS_CERT | 1u << TLS_KEY |        \
   1u << TLS_NAME)

static const struct command {
  const char *name;
  int (*run)(const options *o);
  double timeout_s;
  unsigned takes; /* bits of the options, beside EVERYWHERE */
} commands[] = {{"info", cmd_info, 10, 0},
                {"catalog", cmd_catalog, 10, 1u << WATCH | 1u << COUNT | 1u << SUBSCRIBER},
                {"query", cmd_query, 10,
                 1u << MODEL | 1u << TOKENS | 1u << TOKEN_IDS | 1u << ADAPTER | 1u << NAMESPACE |
                     1u << SUBSCRIBER},
                {"watch", cmd_watch, 10, 1u << POOL | 1u << COUNT | 1u << SUBSCRIBER},
                {"conform", cmd_conform, 15, /* longer than the silence of a filter stream */
                 1u << POOL | 1u << SUBSCRIBER}};

static int bad(const char *what, const char *word) {
  fprintf(stderr, "kvrelay: %s%s%s%s; see kvrelay --help\n", what, word == NULL ? "" : " '",
          word == NULL ? "" : word, word == NULL ? "" : "'");
  return EXIT_USAGE;
}

static bool parse_count(const char *text, uint64_t *out) {
  char *end;
  *out = strtoull(text, &end, 10);
  return text[0] >= '0' && text[0] <= '9' && *end == 0;
}

/* An endpoint a/b/c, or an identity, which has a colon. */
static bool is_pool_name(const char *text) {
  const char *first = strchr(text, '/'), *second = first == NULL ? NULL : strchr(first + 1, '/');
  return strchr(text, ':') != NULL || (second != NULL && first != text && second != first + 1 &&
                                       second[1] != 0 && strchr(second + 1, '/') == NULL);
}

static int secure(const options *o) {
  char why[KVRELAY_TLS_WHY_CAP];
  if ((o->tls_cert == NULL) != (o->tls_key == NULL))
    return bad("--tls-cert and --tls-key belong together", NULL);
  if (wire_secure(o->tls_ca, o->tls_cert, o->tls_key, o->tls_name, why))
    return EXIT_FINE;
  fprintf(stderr, "kvrelay: %s\n", why);
  return EXIT_USAGE;
}

/* Options may stand anywhere behind the command; what is left over is the target.  As long as the
 * list of options. */
static int parse(int argc, char **argv, const struct command *command, options *o) {
  static char name[] = "kvrelay"; /* how getopt begins its messages */
  static const struct option longs[] = {{"model", required_argument, NULL, MODEL},
                                        {"tokens", required_argument, NULL, TOKENS},
                                        {"token-ids", required_argument, NULL, TOKEN_IDS},
                                        {"adapter", required_argument, NULL, ADAPTER},
                                        {"namespace", required_argument, NULL, NAMESPACE},
                                        {"pool", required_argument, NULL, POOL},
                                        {"watch", no_argument, NULL, WATCH},
                                        {"count", required_argument, NULL, COUNT},
                                        {"timeout", required_argument, NULL, TIMEOUT},
                                        {"subscriber-id", required_argument, NULL, SUBSCRIBER},
                                        {"json", no_argument, NULL, JSON},
                                        {"tls", no_argument, NULL, TLS},
                                        {"tls-ca", required_argument, NULL, TLS_CA},
                                        {"tls-cert", required_argument, NULL, TLS_CERT},
                                        {"tls-key", required_argument, NULL, TLS_KEY},
                                        {"tls-server-name", required_argument, NULL, TLS_NAME},
                                        {NULL, 0, NULL, 0}};
  char *end;
  argv[0] = name;
  for (int c, which = 0; (c = getopt_long(argc, argv, "", longs, &which)) != -1;) {
    if (c != '?' && ((command->takes | EVERYWHERE) >> c & 1) == 0) {
      fprintf(stderr, "kvrelay: %s takes no --%s; see kvrelay --help\n", command->name,
              longs[which].name);
      return EXIT_USAGE;
    }
    o->tls |= c >= TLS && c <= TLS_NAME;
    switch (c) {
    case MODEL:
      o->model = optarg;
      break;
    case TOKENS:
      o->tokens_file = optarg;
      break;
    case TOKEN_IDS:
      o->token_ids = optarg;
      break;
    case ADAPTER:
      o->adapter = optarg;
      break;
    case NAMESPACE:
      o->namespace_ = optarg;
      break;
    case POOL:
      if (!is_pool_name(optarg))
        return bad("--pool takes namespace/component/endpoint, not", optarg);
      o->pool = optarg;
      break;
    case WATCH:
      o->watch = true;
      break;
    case COUNT:
      if (!parse_count(optarg, &o->count))
        return bad("--count takes a number, not", optarg);
      break;
    case TIMEOUT:
      o->timeout_s = strtod(optarg, &end);
      if (*end != 0 || end == optarg || !(o->timeout_s > 0 && o->timeout_s <= 86400))
        return bad("--timeout takes seconds above 0, not", optarg);
      break;
    case SUBSCRIBER:
      o->subscriber_id = optarg;
      break;
    case JSON:
      o->json = true;
      break;
    case TLS_CA:
      o->tls_ca = optarg;
      break;
    case TLS_CERT:
      o->tls_cert = optarg;
      break;
    case TLS_KEY:
      o->tls_key = optarg;
      break;
    case TLS_NAME:
      o->tls_name = optarg;
      break;
    case TLS:
      break;
    default:
      return bad("an option is wrong", NULL);
    }
  }
  if (optind + 1 != argc)
    return bad(optind == argc ? "a target host:port is missing" : "one target only", NULL);
  if (command->run == cmd_catalog && o->count != 0 && !o->watch)
    return bad("catalog --count needs --watch", NULL);
  o->target = argv[optind];
  return o->tls ? secure(o) : EXIT_FINE;
}

static int run(int argc, char **argv) {
  if (argc < 2)
    return bad("a command is missing", NULL);
  if (strcmp(argv[1], "--version") == 0) {
    printf("kvrelay %d.%d.%d, contract version %d\n", KVRELAY_VERSION_MAJOR, KVRELAY_VERSION_MINOR,
           KVRELAY_VERSION_PATCH, KVRELAY_WIRE_VERSION);
    return EXIT_FINE;
  }
  bool help = strcmp(argv[1], "help") == 0;
  for (int i = 1; i < argc && !help; i++)
    help = strcmp(argv[i], "--help") == 0;
  if (help) {
    fputs(usage, stdout);
    return EXIT_FINE;
  }
  for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++)
    if (strcmp(argv[1], commands[i].name) == 0) {
      options o = {.timeout_s = commands[i].timeout_s, .subscriber_id = "kvrelay-cli"};
      int code = parse(argc - 1, argv + 1, &commands[i], &o);
      return code == EXIT_FINE ? commands[i].run(&o) : code;
    }
  return bad("unknown command", argv[1]);
}

int main(int argc, char **argv) {
  signal(SIGPIPE, SIG_DFL); /* quiet end when the reader of a pipe goes */
  const int code = run(argc, argv);
  show_flush();
  return code;
}
