/* SPDX-License-Identifier: Apache-2.0 */

/*
 * The same router in C++11: the C objects are members, their memory belongs to vectors, and what
 * may be asked from any thread is const. Its engines speculate with EAGLE: a block is known by its
 * tokens and the one behind them.
 *
 *   c++ -I.. router_query.cpp && ./a.out
 */

#include <algorithm>
#include <cstring>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#define CKF_STATIC /* everything of ckf.h is private to this file */
#define HASHFMT_STATIC
#include "data_centre.h"

namespace {

void check(int err, const char *what) {
  if (err < 0)
    throw std::runtime_error(std::string(what) + ": " + ckf_strerror(err));
}

const int32_t HASH_FORMAT = HASHFMT_FORMAT_EAGLE;

/* A prompt and what is known of it, kept from turn to turn of a conversation. */
class Prompt {
public:
  Prompt() = default;
  Prompt(const Prompt &) = delete; /* its query points at it */
  Prompt &operator=(const Prompt &) = delete;

  /* The tokens of the turn before and those behind them, lent until the next turn. */
  void set(const std::vector<uint32_t> &tokens) {
    const size_t known = ckf_query_known(&query_);
    tokens_ = &tokens;
    locals_.resize(
        static_cast<size_t>(hashfmt_block_count(HASH_FORMAT, BLOCK_SIZE, tokens.size())));
    keys_.resize(locals_.size());
    ckf_query_init_lazy(&query_, locals_.data(), locals_.size(), keys_.data(), known, hash, this);
  }
  size_t blocks() const { return locals_.size(); }
  ckf_query *query() { return &query_; }
  ckf_matches *matches() { return &matches_; }
  std::string answer(unsigned lane) const { /* unknown is not 0 */
    return matches_.lanes >> lane & 1 ? std::to_string(matches_.depths[lane]) : "unknown";
  }

private:
  /* Hashes what a search asks for. All tokens that are left are handed over, because the last block
   * needs one of the next; NOSPACE says that more blocks could have been hashed. */
  static void hash(void *user, uint64_t *locals, size_t from, size_t to) {
    const std::vector<uint32_t> &tokens = *static_cast<const Prompt *>(user)->tokens_;
    size_t all = 0;
    const int err =
        hashfmt_blocks(HASH_FORMAT, BLOCK_SIZE, hashfmt_seed(nullptr, 0, nullptr, 0),
                       tokens.data() + from * BLOCK_SIZE, tokens.size() - from * BLOCK_SIZE,
                       locals + from, nullptr, to - from, &all);
    /* No exception: it would have to pass through C. */
    need(err == HASHFMT_OK || err == HASHFMT_ERR_NOSPACE, "hashes");
  }

  const std::vector<uint32_t> *tokens_ = nullptr;
  std::vector<uint64_t> locals_, keys_;
  ckf_query query_ = ckf_query();
  ckf_matches matches_ = ckf_matches();
};

class Router {
public:
  explicit Router(const std::vector<uint64_t> &dc_ids) : lanes_(dc_ids.size()) {
    const ckf_config cfg = agreed_config();
    ckf_manifest manifest = ckf_manifest();
    manifest.consumer_instance = 1;
    manifest.format.seed = cfg.seed;
    check(ckf_config_check(&cfg, &manifest.format.bucket_count), "configuration");
    for (size_t i = 0; i < dc_ids.size(); i++) {
      manifest.configured |= 1u << i;
      manifest.pools[i].dc_id = dc_ids[i];
    }
    memory_.resize(ckf_table_mem_size(&manifest));
    check(ckf_table_init(&table_, &manifest, 2, memory_.data(), memory_.size()), "table");
    for (uint32_t i = 0; i < lanes_.size(); i++) {
      Lane &lane = lanes_[i];
      lane.lease.consumer_instance = manifest.consumer_instance;
      lane.lease.physical_lane = static_cast<uint8_t>(i);
      lane.lease.assignment_epoch = 1;
      lane.identity.pool = manifest.pools[i];
      lane.identity.format = manifest.format;
      lane.words.resize(static_cast<size_t>(manifest.format.bucket_count));
      check(ckf_lane_claim(&lane.writer, &table_, i), "claim");
      check(ckf_lane_assign(&lane.writer, &lane.identity, &lane.lease), "assign");
      check(
          ckf_assembly_init(&lane.assembly, &manifest.format, lane.words.data(), lane.words.size()),
          "assembly");
    }
  }
  ~Router() {
    for (Lane &lane : lanes_)
      ckf_lane_release(&lane.writer);
  }
  Router(const Router &) = delete; /* lanes point into the table */
  Router &operator=(const Router &) = delete;

  /* From the one thread that reads this data centre's stream. What is refused changes nothing; a
   * delta that does not fit ends the readiness of its lane. */
  void receive(unsigned number, const uint8_t *frame, size_t len) {
    Lane &lane = lanes_.at(number);
    ckf_cbi1_frame view = ckf_cbi1_frame();
    uint64_t sequence = 0;
    ckf_lane_outcome outcome;
    if (ckf_cbi1_decode(&lane.identity.format, frame, len, &view) != CKF_OK ||
        view.dc_id != lane.identity.pool.dc_id)
      return;
    if (view.kind == CKF_CBI1_SNAPSHOT) {
      if (ckf_assembly_absorb(&lane.assembly, &view, &sequence) != 1)
        return; /* more chunks to come */
      outcome = ckf_lane_install(&lane.writer, &lane.identity, &lane.lease, sequence,
                                 lane.words.data(), lane.words.size());
    } else {
      lane.images.clear();
      for (uint32_t i = 0; i < view.image_count; i++)
        lane.images.push_back(ckf_cbi1_image(&view, i));
      outcome = ckf_lane_apply_delta(&lane.writer, &lane.identity, &lane.lease, view.base_epoch,
                                     view.epoch, lane.images.data(), lane.images.size());
    }
    std::cout << "lane " << number << ": " << ckf_lane_result_name(outcome.result) << '\n';
  }

  /* Without it, its data centre has to be asked for a snapshot: readers do not see the lane. */
  bool ready(unsigned number) const { return ckf_lane_ready(&lanes_.at(number).writer); }

  /* From any thread, also while frames come in. */
  void ask(Prompt *prompt) const {
    check(ckf_table_find_again(&table_, prompt->query(), prompt->matches()), "no lane is ready");
  }

private:
  struct Lane {
    ckf_lane writer;
    ckf_lease lease;
    ckf_identity identity = ckf_identity();
    ckf_assembly assembly;
    std::vector<uint64_t> words;
    std::vector<ckf_image> images;
  };
  ckf_table table_;
  std::vector<unsigned char> memory_;
  std::vector<Lane> lanes_;
};

void receive(void *router, unsigned lane, const uint8_t *frame, size_t len) {
  static_cast<Router *>(router)->receive(lane, frame, len);
}

void lose(void *, unsigned lane, const uint8_t *, size_t) {
  std::cout << "lane " << lane << ": a delta is lost\n";
}

} // namespace

int main() try {
  std::vector<uint32_t> tokens(400 * BLOCK_SIZE);
  uint32_t next = 1;
  const auto word = [&next] { return (next = next * 1664525u + 1013904223u) >> 15; };
  std::generate(tokens.begin(), tokens.end(), word);

  Router router({100, 101});
  Prompt prompt;
  data_centre centres[2];
  for (unsigned i = 0; i < 2; i++) {
    data_centre_open(&centres[i], 100 + i, HASH_FORMAT);
    data_centre_caches(&centres[i], tokens.data(), 0, i ? 300 : 40);
    data_centre_sends_snapshot(&centres[i], receive, &router, i);
  }
  for (size_t turn = 0; turn < 3; turn++) {
    prompt.set(tokens);
    router.ask(&prompt);
    std::cout << "turn " << turn << ": " << prompt.answer(0) << " and " << prompt.answer(1)
              << " of " << prompt.blocks() << " blocks\n";
    /* It runs there, and goes on. */
    data_centre_caches(&centres[1], tokens.data(), prompt.matches()->depths[1], prompt.blocks());
    data_centre_sends_delta(&centres[1], turn == 0 ? lose : receive, &router, 1);
    if (!router.ready(1))
      data_centre_sends_snapshot(&centres[1], receive, &router, 1);
    std::generate_n(std::back_inserter(tokens), 20 * BLOCK_SIZE, word);
  }
  for (data_centre &centre : centres)
    free(centre.memory);
  return 0;
} catch (const std::exception &e) {
  std::cerr << e.what() << '\n';
  return 1;
}
