// SPDX-License-Identifier: Apache-2.0
#include "runtime/simulation/world.h"

#include <algorithm>
#include <cstdio>
#include <limits>

#include "check.h"
#include "lib/ipc/event_count.h"

namespace farandole::simulation {
namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kLongest = 1000 * kSecond;  // of a world: each call may stall
constexpr int64_t kMoment = kSecond / 5;      // for which a rank may stop unnoticed
constexpr uint64_t kTurns = 4000;             // in which faults begin
constexpr uint64_t kMostTurns = 20'000'000;
// Until then each call of a broken job has ended: a wire's patience, and that of a rank that leaves.
constexpr int64_t kPatience = 8 * kSecond;
// So long a bucket may stand still whose ranks do not answer.
constexpr int64_t kStandstill = 4 * kSecond;
// So long a call takes that all ranks have made, apart from the batches of hosts.
constexpr int64_t kPrompt = 25'000'000;
constexpr double kShutdown = 60;
constexpr uint8_t kWorked = kDone | kAbsent;

const Config& usual_config() {
  static const Config config = [] {
    Config usual = read_config();
    usual.block_bytes = 4096;
    usual.staging_slots = 2;
    usual.spin_us = 0;
    usual.flight_dir.clear();
    usual.timeline.clear();
    usual.stack_signal = 0;
    return usual;
  }();
  return config;
}

Config config_of(const Coordinator::Settings& settings) {
  Config config = usual_config();
  config.fusion_bytes = static_cast<int64_t>(settings.fusion_bytes);
  config.cache_capacity = static_cast<int64_t>(settings.capacity);
  config.max_process_sets = settings.max_sets;
  config.stall_warn = static_cast<double>(settings.stall_warn_ns) / kSecond;
  config.stall_abort = static_cast<double>(settings.stall_abort_ns) / kSecond;
  config.shutdown_timeout = kShutdown;
  return config;
}

// The most that hosts' batches wait on their way to rank 0, if no user waits there.
int64_t batches_ns(const std::vector<Rank>& node, int fan_out) {
  const std::vector<Rank> above = HostTree::above(node, fan_out);
  const auto up = [&](Rank r) { return above[static_cast<size_t>(r)]; };
  int64_t most = 0;
  for (Rank leader : node) {
    int64_t levels = 0;
    for (Rank r = leader; up(r) >= 0; r = up(r)) ++levels;
    most = std::max(most, levels * Aggregator::kLongestGatherNs);
  }
  return most;
}

}  // namespace

void Statistics::add(const Statistics& other) {
  for (size_t i = 0; i < std::size(ends); ++i) ends[i] += other.ends[i];
  turns += other.turns;
  direct += other.direct;
  duplicates += other.duplicates;
  deaths += other.deaths;
  leaders += other.leaders;
  stops += other.stops;
  cuts += other.cuts;
  several_hosts += other.several_hosts;
}

World::World(const Program& program, uint64_t seed, bool trace)
    : program_(program),
      trace_(trace),
      kernel_(seed ^ 0x5eed),
      random_(seed ^ 0xfa57),
      node_(settle_on_hosts()),
      fan_out_(random_.between(1, 4)),
      prompt_ns_(kPrompt + batches_ns(node_, fan_out_)),
      network_(kernel_, node_),
      syncs_(node_.size(), -1),
      patience_ns_(kPatience + kStandstill),
      rescued_(rescued_wakeups()) {
  const Config config = config_of(program.settings);
  for (Rank r = 0; r < program.settings.size; ++r) {
    PeerInfo info;
    info.host = "host" + std::to_string(node_[static_cast<size_t>(r)]);
    info.pid_namespace = static_cast<uint64_t>(r);  // no rank sees another's process
    peer_infos_.push_back(info);
    ranks_.push_back(
        std::make_unique<SimulatedRank>(program, Topology::of(r, node_), config, *this));
    kernel_.spawn(r, [this, r] { ranks_[static_cast<size_t>(r)]->live(); });
  }
  make_faults();
}

World::~World() {
  for (Rank rank : dead_) ranks_[static_cast<size_t>(rank)].reset();
}

// Every other world has several hosts; their ranks lie anyhow, and so few link to one that there are levels.
std::vector<Rank> World::settle_on_hosts() {
  const int size = program_.settings.size;
  std::vector<Rank> node(static_cast<size_t>(size), 0);
  const bool linked = program_.trouble == Trouble::kCut || program_.trouble == Trouble::kSilence;
  if (size < 2 || (!linked && random_.chance(0.7))) return node;
  const int hosts = random_.between(2, std::min(size, 6));
  const bool in_turns = random_.chance(0.5);
  for (Rank r = 0; r < size; ++r) {
    const int host = in_turns ? r % hosts : r * hosts / size;
    node[static_cast<size_t>(r)] = in_turns ? host : (host * size + hosts - 1) / hosts;
  }
  statistics_.several_hosts = 1;
  return node;
}

// Some ranks and links are slow, or stop for a moment.
void World::make_faults() {
  const Rank last = program_.settings.size - 1;
  if (random_.chance(0.3)) {
    const int times = random_.between(2, 50);
    const Rank rank = random_.between(0, last);
    tell("rank " + std::to_string(rank) + " is " + std::to_string(times) + " times slower");
    kernel_.slow_down(rank, times);
  }
  if (random_.chance(0.3)) {
    const auto [from, to] = two_hosts();
    const int64_t most_ns = random_.between(100'000, 20'000'000);
    const Carries what = random_carried();
    even_ = false;
    tell("the link from rank " + std::to_string(from) + "'s host to rank " + std::to_string(to) +
         "'s takes up to " + std::to_string(most_ns) + " ns");
    network_.slow_down(what, from, to, most_ns);
  }
  const auto plan = [this](std::function<void()> fault) {
    faults_.emplace(random_.below(kTurns), std::move(fault));
  };
  if (program_.trouble == Trouble::kLittle && random_.chance(0.3)) {
    even_ = false;
    plan([this, rank = random_.between(0, last)] { stop(rank, kernel_.delay(kMoment)); });
  }
  if (program_.trouble == Trouble::kHunger) network_.starve(random_.chance(0.5) ? 0.1 : 0.5);
  if (program_.trouble == Trouble::kStop) {
    for (int more = random_.between(1, 2); more > 0; --more) {
      const int64_t long_ns = kSecond + kernel_.delay(8 * kSecond);
      plan([this, rank = random_.between(0, last),
            ns = random_.chance(0.5) ? Kernel::kNever : long_ns] { stop(rank, ns); });
    }
  }
  const bool cuts = program_.trouble == Trouble::kCut || program_.trouble == Trouble::kSilence;
  if (const auto [one, other] = two_hosts(); cuts && one != other) {
    plan([this, one, other] { cut(one, other); });
  }
}

// The leaders of two hosts; the same twice: there is only one.
std::pair<Rank, Rank> World::two_hosts() {
  std::vector<Rank> leaders = node_;
  std::ranges::sort(leaders);
  leaders.erase(std::ranges::unique(leaders).begin(), leaders.end());
  random_.shuffle(leaders);
  return {leaders.front(), leaders.back()};
}

World::Carries World::random_carried() {
  return random_.chance(0.5) ? Carries::kMessages : Carries::kBytes;
}

void World::start(const SimulatedRank& rank, const Config& config,
                  std::unique_ptr<Runtime>& runtime) {
  const Topology& topology = rank.topology;
  auto& own = configs_.try_emplace(topology.rank, config).first->second;
  auto fabric = std::make_unique<Fabric>(own, topology, peer_infos_, JobKey{}, nullptr);
  BackendFactory sizes(own, topology, *fabric, {});
  const SegmentSize staging = sizes.staging_size(kWorldSet, numbers_below(topology.size));
  fabric->use(network_.connect(topology, staging, fan_out_));
  Fabric& connected = *fabric;
  runtime = std::make_unique<Runtime>(own, topology, peer_infos_, std::move(fabric));
  network_.open(topology.rank, [&connected] { connected.wakeup().notify(); });
  if (++up_ == ranks_.size()) kernel_.wake_all(kUp);
  while (up_ < ranks_.size()) kernel_.sleep_for(kUp, std::numeric_limits<int64_t>::max());
}

Statistics World::run() {
  while (!all_done()) {
    if (up_ == ranks_.size()) {
      ++turns_;
      make_due_faults();
    }
    if (!kernel_.step() && !all_done()) give_up("nothing happens any more");
    if (kernel_.now_ns() > kLongest) give_up("the world does not end");
    if (turns_ > kMostTurns) give_up("the world does not come to rest");
  }
  if (rescued_wakeups() != rescued_) give_up("a wake-up was lost");
  for (Rank rank : std::exchange(frozen_, {})) {
    dead_.insert(rank);
    kernel_.drop(rank);
  }
  check_calls();
  statistics_.turns = static_cast<int64_t>(turns_);
  return statistics_;
}

bool World::all_done() const {
  return std::ranges::all_of(
      ranks_, [this](const auto& rank) { return rank->done() || gone(rank->topology.rank); });
}

void World::give_up(const std::string& why) const {
  std::string text = why;
  for (const auto& rank : ranks_) {
    if (!rank->done() && !gone(rank->topology.rank)) text += "\n  " + rank->where();
  }
  for (Rank rank : dead_) text += "\n  rank " + std::to_string(rank) + " is dead";
  for (Rank rank : frozen_) text += "\n  rank " + std::to_string(rank) + " is stopped";
  check::fail(text);
}

// ---- Faults

void World::make_due_faults() {
  while (!faults_.empty() && faults_.begin()->first <= turns_) {
    const auto fault = std::move(faults_.begin()->second);
    faults_.erase(faults_.begin());
    fault();
  }
}

void World::tell(const std::string& what) const {
  if (!trace_) return;
  std::fprintf(stderr, "%10.6f s: %s\n", static_cast<double>(now_ns()) / kSecond, what.c_str());
}

void World::stop(Rank rank, int64_t for_ns) {
  const SimulatedRank& stopped = *ranks_[static_cast<size_t>(rank)];
  const bool for_ever = for_ns == Kernel::kNever;
  if (stopped.done() || gone(rank) || (for_ever && stopped.left())) return;
  tell(stopped.where() + " stops for " + (for_ever ? "ever" : std::to_string(for_ns) + " ns"));
  kernel_.stop(rank, for_ever ? for_ns : kernel_.now_ns() + for_ns);
  if (for_ns <= kMoment) return;
  ++statistics_.stops;
  troubled_ = true;
  hurt_ns_ = std::max(hurt_ns_, now_ns() + (for_ever ? 0 : for_ns));
  if (!for_ever) return;
  frozen_.insert(rank);
  reach(rank, std::numeric_limits<int64_t>::max());
}

// Silence is noticed by both after a while.
void World::cut(Rank one, Rank other) {
  const bool silence = program_.trouble == Trouble::kSilence;
  const int64_t noticed_ns = now_ns() + (silence ? kernel_.delay(4 * kSecond) : 0);
  std::set<Carries> what{Carries::kMessages, Carries::kBytes};
  if (random_.chance(0.5)) what.erase(random_carried());
  tell("the link from rank " + std::to_string(one) + "'s host to rank " + std::to_string(other) +
       "'s " + (silence ? "is silent" : "ends") + (what.size() == 2 ? "" : " for some") +
       "; noticed at " + std::to_string(noticed_ns) + " ns");
  ++statistics_.cuts;
  troubled_ = true;
  hurt_ns_ = noticed_ns;
  for (Carries one_kind : what) {
    if (silence) network_.silence(one_kind, one, other);
    kernel_.at(noticed_ns, [=, this] { network_.end(one_kind, one, other); });
  }
}

// Deaths

void World::let_die(Rank rank) {
  const SimulatedRank& doomed = *ranks_[static_cast<size_t>(rank)];
  if (doomed.left() || dead_.contains(rank) || living() == 1) return;
  die(rank);
  ++statistics_.deaths;
  statistics_.leaders += doomed.topology.local_rank == 0 && doomed.topology.local_size() > 1;
}

void World::die(Rank rank) {
  tell(ranks_[static_cast<size_t>(rank)]->where() + " dies");
  dead_.insert(rank);
  troubled_ = true;
  job_breaks(rank);
  kernel_.drop(rank);
  network_.lose(rank, kernel_.delay(2'000'000));
  for (Rank peer : ranks_[static_cast<size_t>(rank)]->topology.local) {
    if (peer == rank) continue;
    kernel_.at(kernel_.now_ns() + kernel_.delay(2'000'000),
               [this, peer, rank] { tell(peer, rank); });
  }
}

// As DeathWatch does.
void World::tell(Rank to, Rank dead) {
  Runtime* runtime = ranks_[static_cast<size_t>(to)]->runtime();
  if (!runtime || dead_.contains(to)) return;
  runtime->lose(dead, {ErrorCode::kPeer, "rank " + std::to_string(dead) + " died"});
}

void World::die_now(Rank rank) {
  kernel_.at(kernel_.now_ns(), [this, rank] { die(rank); });
  for (;;)
    kernel_.sleep_for(kPauses + 1 + static_cast<uint64_t>(rank),
                      std::numeric_limits<int64_t>::max());
}

void World::job_breaks(Rank rank) {
  if (broken_ns_ == 0) broken_ns_ = kernel_.now_ns();
  // Ranks in a sync may not learn of it: the rank that would tell them may be stopped.
  kernel_.at(kernel_.now_ns() + kPatience,
             [this, rank] { reach(rank, std::numeric_limits<int64_t>::max()); });
}

void World::check_in_time(int64_t begun_ns) {
  const int64_t since = std::max({begun_ns, broken_ns_, hurt_ns_});
  if (broken_ns_ != 0 && kernel_.now_ns() - since > kPatience) {
    give_up("a call of a broken job ends after " + std::to_string(kernel_.now_ns() - since) +
            " ns");
  }
}

void World::check_wait(Rank rank, int64_t begun_ns) const {
  const int64_t took_ns = now_ns() - std::max(begun_ns, hurt_ns_);
  if (took_ns > patience_ns_) {
    give_up("rank " + std::to_string(rank) + " waits for " + std::to_string(took_ns) + " ns");
  }
}

void World::check_prompt(Rank rank, int call, int64_t begun_ns) {
  const int64_t late_ns = now_ns() - std::max({begun_ns, made_ns_[call], joined_ns_});
  if (!even_ || troubled_ || late_ns <= prompt_ns_) return;
  give_up("rank " + std::to_string(rank) + " waits " + std::to_string(late_ns) + " ns for call " +
          std::to_string(call) + ", which all ranks had made");
}

// ---- The oracle

void World::reach(Rank rank, int64_t sync) {
  syncs_[static_cast<size_t>(rank)] = sync;
  const int64_t least = *std::ranges::min_element(syncs_);
  if (least <= passed_) return;
  passed_ = least;
  kernel_.wake_all(kSyncs);
}

// All ranks agree whether a call has worked.
void World::check_calls() {
  const bool aborted = broken_ns_ != 0 || broke_;
  for (size_t c = 0; c < program_.calls.size(); ++c) {
    uint8_t ends = 0;
    for (const auto& rank : ranks_) {
      if (dead_.contains(rank->topology.rank)) continue;
      const uint8_t end = rank->outcome(static_cast<int>(c));
      ++statistics_.ends[end];
      if (!rank->leaves_early()) ends |= end;
    }
    if (aborted) continue;  // it may come between two ranks' ends of one bucket
    // The last ranks may change a set without those that have given it up and left.
    const uint8_t failed =
        spares_the_left(program_.calls[c].request) ? ~kWorked & ~kStalled : ~kWorked;
    if ((ends & kWorked) != 0 && (ends & failed) != 0) {
      check::fail("call " + std::to_string(c) + " '" + program_.calls[c].request.name +
                  "' works on some ranks only: outcomes " + std::to_string(ends));
    }
  }
  for (const auto& rank : ranks_) statistics_.direct += rank->direct_calls();
}

}  // namespace farandole::simulation
