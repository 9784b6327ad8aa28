// SPDX-License-Identifier: Apache-2.0
#include "control/simulator/simulator.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <utility>

#include "check.h"

namespace farandole::simulation {

constexpr int64_t kMessageNs = 3000;  // at most, as the lane's and the user's time
constexpr int64_t kLaneNs = 8000;

Simulator::Simulator(const Program& program, uint64_t seed, bool trace)
    : program_(program),
      random_(seed ^ 0x5eed),
      trace_(trace),
      coordinator_(program.settings),
      members_(static_cast<size_t>(program.settings.size)),
      bucket_of_(program.calls.size()),
      checked_(program.calls.size()) {
  settle_on_hosts();
  for (Rank r = 0; r < program.settings.size; ++r) {
    member(r).rank = std::make_unique<VirtualRank>(program, r, *this);
    step_after(r, 0);
  }
}

Statistics Simulator::run() {
  while (!all_done()) {
    int64_t next = events_.empty() ? std::numeric_limits<int64_t>::max() : events_.top().time;
    if (coordinator_.next_tick() < next) {
      now_ = std::max(now_, coordinator_.next_tick());
      coordinator_.tick(now_);
      statistics_.notices += std::ssize(coordinator_.take_notices());
      publish();
      continue;
    }
    if (events_.empty()) {
      std::string text = "nothing happens any more";
      for (Member& m : members_) {
        if (!m.rank->done()) text += "\n  " + m.rank->where();
      }
      check::fail(text);
    }
    Event event = events_.top();
    events_.pop();
    now_ = event.time;
    let_die();
    handle(event);
  }
  check_end();
  return statistics_;
}

bool Simulator::all_done() {
  while (finished_ < members_.size() && members_[finished_].rank->done()) ++finished_;
  return finished_ == members_.size();
}

int Simulator::living() const {
  return static_cast<int>(
      std::ranges::count_if(members_, [](const Member& m) { return !m.rank->dead(); }));
}

void Simulator::let_die() {
  ++handled_;
  while (!dooms_.empty() && dooms_.begin()->first <= handled_) {
    const Rank rank = dooms_.begin()->second;
    dooms_.erase(dooms_.begin());
    if (member(rank).rank->dead() || living() == 1) continue;
    if (trace_) print("rank " + std::to_string(rank) + " dies");
    member(rank).rank->die();
    die(rank);
    ++statistics_.deaths;
  }
}

void Simulator::after(int64_t delay, What what, Rank rank, SetId set) {
  events_.push({now_ + delay, order_++, what, rank, set});
}

void Simulator::handle(const Event& event) {
  Member& m = member(event.rank);
  switch (event.what) {
    case What::kServe: return serve();
    case What::kRelay: return relay(event.rank);
    case What::kLose:
      if (host_of(event.rank)) return report(event.rank, Lost{{ErrorCode::kPeer, "lost"}});
      while (!m.inbox.empty()) m.inbox.pop_front();
      coordinator_.lose(event.rank, {ErrorCode::kPeer, "lost"});
      return publish();
    case What::kRead: read(event.rank); break;
    case What::kLane: m.rank->finish_bucket(event.set); break;
    case What::kStep: break;
  }
  m.rank->step();
}

void Simulator::read(Rank rank) {
  Member& m = member(rank);
  m.reading = false;
  if (m.rank->dead()) return;
  const size_t end = host_of(rank) ? host_of(rank)->cursor : log_.size();
  size_t count = end - m.cursor;
  if (random_.chance(0.3)) count = random_.below(count + 1);
  for (; count > 0; --count) m.rank->read(log_[m.cursor++]);
  if (m.cursor == end) return;
  m.reading = true;
  after(delay(kMessageNs), What::kRead, rank);
}

void Simulator::report(Rank from, const Report& report) {
  if (trace_) print("rank " + std::to_string(from) + " reports " + text_of(report));
  ByteString bytes;
  encode(report, bytes);
  Host* host = host_of(from);
  if (!host) return send(from, std::move(bytes));
  host->reports.emplace_back(from, std::move(bytes));
  if (!std::exchange(host->relaying, true)) expect_relay(*host, delay(kMessageNs));
}

// To the coordinator.
void Simulator::send(Rank sender, ByteString message) {
  Member& m = member(sender);
  if (m.inbox.empty()) senders_.push_back(sender);
  m.inbox.push_back(std::move(message));
  if (!std::exchange(serving_, true)) after(delay(kMessageNs), What::kServe, 0);
}

// Takes some reports, of anybody who sent; each sender's own stay in order.
void Simulator::serve() {
  serving_ = false;
  size_t most = random_.chance(0.3) ? std::numeric_limits<size_t>::max()
                                    : 1 + random_.below(2 * senders_.size() + 2);
  for (; most > 0 && !senders_.empty(); --most) {
    size_t at = random_.below(senders_.size());
    Rank from = senders_[at];
    Member& m = member(from);
    if (!m.inbox.empty()) receive(from);
    if (m.inbox.empty()) {
      senders_[at] = senders_.back();
      senders_.pop_back();
    }
  }
  publish();
  if (senders_.empty() || std::exchange(serving_, true)) return;
  after(delay(kMessageNs), What::kServe, 0);
}

void Simulator::receive(Rank from) {
  Member& m = member(from);
  ByteString message = std::move(m.inbox.front());
  m.inbox.pop_front();
  ++statistics_.reports;
  if (host_of(from)) return receive_records(from, message);
  const Report report = decode_report(message);
  take(from, report);
  coordinator_.receive(from, report, now_);
}

// What the checks must know of a report.
void Simulator::take(Rank from, const Report& report) {
  if (auto* done = std::get_if<Done>(&report)) buckets_[done->set].done = done->bucket;
  if (auto* forgot = std::get_if<Forgot>(&report)) dropped_[forgot->id].insert(from);
  left_ += std::holds_alternative<Leave>(report);
  if (auto* many = std::get_if<ReadyMany>(&report)) statistics_.batches += many->ids.size() > 1;
}

void Simulator::publish() {
  std::vector<Entry> entries;
  coordinator_.publish(entries);
  for (const Entry& entry : entries) {
    ByteString bytes;
    encode(entry, bytes);
    log_.push_back(decode_entry(bytes));
    check_entry(log_.back());
    ++statistics_.entries;
  }
  if (entries.empty()) return;
  for (auto& [leader, host] : hosts_) {
    if (!std::exchange(host.relaying, true)) expect_relay(host, delay(kMessageNs));
  }
  for (Rank r = 0; r < program_.settings.size; ++r) {
    Member& m = member(r);
    if (host_of(r) || m.rank->dead() || std::exchange(m.reading, true)) continue;
    after(delay(kMessageNs), What::kRead, r);
  }
}

void Simulator::start_lane(Rank rank, SetId set) { after(delay(kLaneNs), What::kLane, rank, set); }

void Simulator::step_after(Rank rank, int64_t ns) {
  after(ns > 0 ? ns : delay(kMessageNs), What::kStep, rank);
}

void Simulator::reach(Rank rank, int64_t sync) {
  member(rank).sync = sync;
  bool all = std::ranges::all_of(members_, [&](const Member& m) { return m.sync > passed_; });
  if (!all) return;
  ++passed_;
  for (Rank r = 0; r < program_.settings.size; ++r) step_after(r, 0);
}

void Simulator::die(Rank rank) { after(delay(kMessageNs), What::kLose, rank); }

}  // namespace farandole::simulation
