// SPDX-License-Identifier: Apache-2.0
#include "runtime/calls/rank_calls.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <set>
#include <utility>

#include "base/clock.h"
#include "base/error.h"

namespace farandole {
namespace {

// A bucket takes two round trips where a report with its input takes one, and costs less than many of these. Many,
// or one that moves in a bucket anyway: the others go with it, so that all ranks add them in the same order. On one
// host, calls `under_way` count too. Which these are depends on timing, so between hosts, where buckets add in
// another order, they don't.
bool rides_along(std::span<const PreparedSubmission> batch, size_t under_way) {
  constexpr size_t kMany = 8;
  return under_way + batch.size() < kMany &&
         std::ranges::all_of(
             batch,
             [](const PreparedSubmission& one) {
               return one.call->submission.recorded.bytes <= kTinyBytes;
             });
}

constexpr size_t kMaxAnswers = 64;

// Names an unnamed group by its place in the order. The names repeat, so that ranks don't have to exchange
// ever new ones.
std::string name_of_group(uint64_t number) {
  constexpr uint64_t kNames = 256;
  return "unnamed group " + std::to_string(number % kNames);
}

Outcome failed(Failure failure) {
  Outcome outcome;
  outcome.failure = std::move(failure);
  return outcome;
}

Outcome valued(int64_t value) {
  Outcome outcome;
  outcome.value = value;
  return outcome;
}

// Describes one call to the lane. Without a submission (this rank has joined) the part has no buffers.
Part part_of(const Item& item, const Request& request, const ProcessSet& set,
             const std::optional<Submission>& mine) {
  Part part;
  part.signature = request.signature;
  part.divisor = divisor_of(request.signature.reduce_op, set.members());
  part.rows = rows_of(item.rows, request.signature, set.members());
  if (request.signature.traits().rooted()) {
    part.signature.root = set.member_of(request.signature.root);
  }
  if (!item.absent.empty()) {
    part.present.assign(static_cast<size_t>(set.members()), true);
    for (int32_t m : item.absent) part.present[static_cast<size_t>(m)] = false;
  }
  if (mine) {
    part.input = mine->input;
    part.output = mine->output;
    part.produced = mine->produced;
    part.signature.shape = mine->shape;
  } else if (!part.signature.shape.empty() && part.signature.shape[0] < 0) {
    part.signature.shape[0] = 0;
  }
  return part;
}

std::vector<Item> items_of(const Run& run) {
  std::vector<Item> items = run.items;
  items.reserve(items.size() + run.plain.size());
  run.plain.for_each([&](uint32_t id) { items.push_back(Item{id}); });
  return items;
}

// For a profiler.
std::string label_of(uint64_t bucket, const std::vector<Item>& items, const PendingTable& pending) {
  constexpr size_t kNames = 8;
  std::string label = "bucket " + std::to_string(bucket);
  const size_t shown = std::min(items.size(), kNames);
  for (size_t i = 0; i < shown; ++i) {
    const std::string& name = pending.request_of(items[i].id).name;
    label += (i == 0 ? ": " : ", ") + (name.empty() ? "unnamed" : name);
  }
  const size_t left = items.size() - shown;
  return left == 0 ? label : label + " and " + std::to_string(left) + " more";
}

Outcome outcome_of(const Signature& signature, const std::vector<int64_t>& rows,
                   const ProcessSet& set, Submission& mine,
                   const std::shared_ptr<GpuDevice>& device) {
  const bool on_gpu = mine.device != kCpuDevice;
  Outcome outcome = outcome_of(signature, rows, set.member, set.members(), std::move(mine.shape),
                               mine.output, on_gpu ? device : nullptr);
  outcome.value = mine.value;
  return outcome;
}

}  // namespace

// ---- Reports

void RankCalls::report(const Report& report) {
  std::lock_guard lock(mutex_);
  reporter_.send(report);
}

void RankCalls::expedite() {
  if (!reporter_.may_expedite()) return;
  std::lock_guard lock(mutex_);
  reporter_.expedite();
}

bool RankCalls::flush() {
  std::lock_guard lock(mutex_);
  return reporter_.flush();
}

// ---- Submissions

Submission PreparedSubmission::submission() const {
  Submission made = call->submission;
  made.input = static_cast<const std::byte*>(input);
  made.output = static_cast<std::byte*>(output);
  made.stream = stream;
  made.produced = produced;
  return made;
}

void RankCalls::check_open() const {
  if (closed_) throw Error(ErrorCode::kShutdown, "this rank has shut down; call init() first");
  if (job.broken()) throw Error(job.failure().code, job.failure().text);
}

ProcessSet RankCalls::set_of(const Request& request) {
  std::lock_guard lock(mutex_);
  check_open();
  return working_set(request, sets_);
}

std::optional<ProcessSet> RankCalls::find_set(SetId id) {
  std::lock_guard lock(mutex_);
  const ProcessSet* set = sets_.find(id);
  return set ? std::optional(*set) : std::nullopt;
}

// Each name is stored once, however often it is used.
void RankCalls::describe(CheckedCall& call) {
  const Signature& signature = call.request.signature;
  RecordedCall& recorded = call.submission.recorded;
  recorded.name = setup_.recorder.label_of(call.request.name);
  recorded.site = setup_.recorder.label_of(call.site);
  recorded.set = call.request.set;
  recorded.op = signature.op;
  recorded.dtype = signature.dtype;
  recorded.peer = call.request.peer;
  recorded.tag = call.request.tag;
  if (!signature.traits().moves_bytes()) return;
  recorded.bytes = size_of(signature.dtype);
  for (int64_t n : call.submission.shape) recorded.bytes *= static_cast<uint64_t>(n);
}

std::vector<Handle> RankCalls::submit(std::vector<CheckedCall> calls) {
  std::lock_guard lock(mutex_);
  check_open();
  std::set<std::pair<SetId, std::string>> names;
  for (size_t i = 0; i < calls.size(); ++i) {
    Request& request = calls[i].request;
    working_set(request, sets_);  // may have changed since it was checked
    const CollectiveTraits& traits = request.signature.traits();
    const bool grouped = calls.size() > 1;
    if (grouped) check_together(calls.front().request, request);
    if (grouped && request.name.empty()) {
      request.group = name_of_group(pending_.next_unnamed(request.set));
      request.signature.group_size = static_cast<int32_t>(calls.size());
      calls[i].submission.index_in_group = i;
    } else if (grouped && !names.emplace(request.set, request.name).second) {
      throw Error(ErrorCode::kInvalidArgument,
                  "'" + request.name + "' is twice in one group; give each tensor its own name");
    }
    // A message's name does not identify it.
    if (!traits.paired()) pending_.check_free(request, calls[i].submission, calls[i].record);
    describe(calls[i]);
  }
  std::vector<Handle> made;
  for (CheckedCall& one : calls) {
    made.push_back(enter(one.request, std::move(one.submission), /*rides=*/true));
  }
  reporter_.pass_batch();
  return made;
}

void RankCalls::submit(std::span<PreparedSubmission> batch) {
  std::exception_ptr error;
  std::lock_guard lock(mutex_);
  check_open();
  const bool rides = rides_along(batch, setup_.one_host ? riders_ : 0);
  try {
    for (PreparedSubmission& one : batch) one.handle = enter(one, rides);
  } catch (...) {
    error = std::current_exception();
  }
  reporter_.pass_batch();
  if (error) std::rethrow_exception(error);
}

void RankCalls::prepare(CheckedCall& call) {
  std::lock_guard lock(mutex_);
  check_open();
  describe(call);
  call.submission.prepared = ++prepared_;
}

Handle RankCalls::enter(const PreparedSubmission& prepared, bool rides) {
  const Request& request = prepared.call->request;
  Submission submission = prepared.submission();
  const ProcessSet& set = working_set(request, sets_);
  if (!request.signature.traits().paired()) {
    pending_.check_free(request, submission, prepared.call->record);
  }
  try {
    check_buffers(request, submission, set);
  } catch (const Error& e) {
    refuse(request, {e.code(), e.what()});
    throw;
  }
  return enter(request, std::move(submission), rides);
}

// `rides`: its input may travel in the report.
Handle RankCalls::enter(const Request& request, Submission submission, bool rides) {
  if (!gets_result(request.signature, setup_.own)) submission.output = nullptr;
  submission.handle = handles.create(submission.recorded.name, submission.device != kCpuDevice);
  submission.recorded.call = submission.handle;
  Handle handle = submission.handle;
  const bool paired = request.signature.traits().paired();
  uint64_t sequence = 0;
  if (paired) {
    sequence = posted_.next;
  } else if (request.name.empty()) {
    sequence = pending_.next_unnamed(request.set, submission.index_in_group);
  }
  setup_.recorder.submitted(submission.recorded, sequence, submission.shape);
  if (request.signature.op == Op::kJoin) {
    ProcessSet& set = sets_.own(request.set);
    set.join = submission.recorded;
    set.join_told = false;
    tell_join(request.set);
    return handle;
  }
  Contribution given = contribution_of(request, submission, setup_.own);
  submission.rider = given.has_payload && !paired;
  riders_ += submission.rider;
  if (!rides) given.has_payload = false, given.payload = {};
  if (paired) {
    posted_.waiting.emplace(posted_.next++, std::move(submission));
    reporter_.pass(Post{request, sequence, std::move(given)});
    return handle;
  }
  if (const uint32_t id = pending_.submit_known(request, submission)) {
    reporter_.pass_known(id, std::move(given));
    return handle;
  }
  if (auto news = pending_.submit(request, std::move(submission), std::move(given))) {
    reporter_.pass(*news);
  }
  return handle;
}

void RankCalls::refuse(std::span<const Request> names, const Failure& why, bool free_only) {
  std::lock_guard lock(mutex_);
  check_open();
  std::set<std::pair<SetId, std::string>> refused;
  for (const Request& one : names) {
    if (!refused.emplace(one.set, one.name).second) continue;
    if (!free_only || !pending_.in_flight(one)) refuse(one, why);
    if (!one.group.empty() && one.name == one.group) return;
  }
}

// If a call of the name is in flight, peers learn of it after that call; a refused join() is reported when this rank
// joins, because all ranks have to. Of a message only the rank at the other end is told, if it is known which that is.
void RankCalls::refuse(const Request& request, const Failure& why) {
  ProcessSet* set = sets_.find(request.set);
  if (!set || set->member < 0 || set->joined() || is_pair(request.set)) return;
  if (by_members(request) && request.signature.shape.empty()) return;  // nobody is known to wait
  Failure failure{why.code, "rank " + std::to_string(setup_.own) + " refused: " + why.text};
  const CollectiveTraits& traits = request.signature.traits();
  if (request.signature.op == Op::kJoin) {
    set->join_failure = std::move(failure);
  } else if (traits.paired()) {
    const bool any = request.peer == kAnyRank && traits.end == End::kReceiver;
    const bool known = any || (set->member_of(request.peer) >= 0 && request.peer != setup_.own);
    if (!known || request.tag < 0) return;
    reporter_.pass(Post{request, posted_.next++, {}, std::move(failure)});
  } else if (auto news = pending_.refuse(request, std::move(failure))) {
    reporter_.pass(*news);
  }
}

uint64_t RankCalls::count_unnamed(SetId set) {
  std::lock_guard lock(mutex_);
  check_open();
  return pending_.next_unnamed(set);
}

// Reports this rank's join() once no report before it waits, because a rank that has joined reports nothing.
void RankCalls::tell_join(SetId id) {
  ProcessSet* set = sets_.find(id);
  if (!set || !set->joined() || set->join_told || pending_.owes_reports(id)) return;
  set->join_told = true;
  reporter_.send(Join{id, std::exchange(set->join_failure, {})});
}

// ---- Questions

uint64_t RankCalls::ask(Handle handle) {
  std::lock_guard lock(mutex_);
  std::optional<SetId> joined = sets_.joined_by(handle);
  std::optional<CallKey> key = pending_.key_of(handle);
  if (const auto number = posted_.number_of(handle)) {
    key = CallKey{posted_.waiting.at(*number).recorded.set, {}, *number, setup_.own};
  }
  if (joined) key = CallKey{*joined, "", 0};
  if (!key) return 0;
  const uint64_t number = ++asked_;
  reporter_.pass(Inquire{number, *key, joined.has_value()});
  return number;
}

std::optional<std::string> RankCalls::answer(uint64_t number) {
  std::lock_guard lock(mutex_);
  auto answer = answers_.extract(number);
  return answer ? std::optional(std::move(answer.mapped())) : std::nullopt;
}

// ---- The log

void RankCalls::on(const Define& define) {
  std::lock_guard lock(mutex_);
  pending_.define(define);
}

void RankCalls::on(const Forget& forget) {
  std::lock_guard lock(mutex_);
  pending_.forget(forget.id);
  reporter_.send(Forgot{forget.id});
}

// Allocates the outputs whose size only negotiation could tell.
BegunRun RankCalls::begin(const Run& run, uint64_t log_position,
                          const std::shared_ptr<GpuDevice>& device, bool labelled) {
  const ProcessSet& set = sets_.own(run.set);
  const std::vector<Item> items = items_of(run);
  std::vector<std::optional<Submission>> taken;
  taken.reserve(items.size());
  {
    std::lock_guard lock(mutex_);
    for (const Item& item : items) taken.push_back(pending_.take(item.id, item.sequence));
  }
  BegunRun made{{}, std::make_shared<std::vector<Ending>>(), {}};
  made.bucket.parts.reserve(items.size());
  made.endings->reserve(items.size());
  if (labelled) made.label = label_of(run.bucket, items, pending_);
  const int64_t now = now_ns();
  uint64_t bytes = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    std::optional<Submission>& mine = taken[i];
    Part part = part_of(items[i], pending_.request_of(items[i].id), set, mine);
    if (mine) {
      Outcome outcome = outcome_of(part.signature, part.rows, set, *mine, device);
      setup_.recorder.negotiated(mine->recorded, run.bucket, log_position, now);
      part.output = outcome.output;
      made.endings->push_back({std::move(*mine), std::move(outcome)});
    }
    bytes += part.signature.bytes();
    made.bucket.parts.push_back(std::move(part));
  }
  auto launched_ns = std::make_shared<int64_t>(0);
  made.bucket.begun = [this, bytes, launched_ns, set = run.set, number = run.bucket,
                       tensors = made.bucket.parts.size()] {
    *launched_ns = setup_.recorder.launched(set, number, tensors, bytes);
  };
  // The set's lowest member reports the end.
  made.bucket.done = [this, bytes, launched_ns, done = Done{run.set, run.bucket, run.gpu},
                      lowest = set.member == 0, endings = made.endings](const Failure* failure) {
    if (!failure) setup_.recorder.moved(done.set, done.bucket, bytes, *launched_ns);
    settle(*endings, failure);
    if (lowest && !failure) report(done);
  };
  return made;
}

void RankCalls::on(const Result& result, uint64_t log_position,
                   const std::shared_ptr<GpuDevice>& device) {
  std::optional<Submission> mine;
  Outcome outcome;
  {
    std::lock_guard lock(mutex_);
    ProcessSet* set = sets_.find(result.set);
    if (!set || set->member < 0) return;
    mine = pending_.take(result.id, result.sequence);
    if (!mine) return;
    setup_.recorder.negotiated(mine->recorded, 0, log_position, now_ns());
    const Signature& signature = pending_.request_of(result.id).signature;
    outcome =
        outcome_of(signature, rows_of(result.rows, signature, set->members()), *set, *mine, device);
  }
  outcome.absent = result.absent;
  if (outcome.output && !result.payload.empty()) {
    std::memcpy(outcome.output, result.payload.data(), result.payload.size());
  }
  finish(std::move(mine), std::move(outcome));
}

// Also for removed sets: a report of this rank may have come too late.
void RankCalls::on(const Fail& fail) {
  if (std::ranges::count(fail.unheard, setup_.own) > 0) return;
  if (fail.key.posted() && fail.key.poster != setup_.own) return;
  std::optional<Submission> mine;
  {
    std::lock_guard lock(mutex_);
    std::vector<Report> next;
    if (fail.key.posted()) {
      mine = posted_.take(fail.key.sequence);
    } else {
      mine = pending_.fail(fail.key, next);
    }
    for (const Report& report : next) reporter_.send(report);
    if (!next.empty()) tell_join(fail.key.set);
  }
  finish(std::move(mine), failed(fail.failure));
}

void RankCalls::on(const Joined& joined) {
  Submission mine;
  {
    std::lock_guard lock(mutex_);
    ProcessSet* set = sets_.find(joined.set);
    if (!set || set->member < 0) return;
    mine.recorded = std::exchange(set->join, {});
    if (mine.recorded.call == 0) return;  // other ranks' join; this rank counts its own calls
    pending_.resume(joined.set, joined.next_sequence);
  }
  mine.handle = mine.recorded.call;
  finish(std::move(mine), joined.failure ? failed(joined.failure) : valued(joined.last));
}

void RankCalls::on(const Matched& matched) {
  const bool sends = matched.sender == setup_.own;
  if (!sends && matched.receiver != setup_.own) return;
  std::lock_guard lock(mutex_);
  std::optional<Submission> mine = posted_.take(sends ? matched.sent : matched.received);
  if (!mine) return;
  mine->value = matched.sender;
  mine->recorded.set = matched.pair;  // whose buckets move it
  pending_.submit(matched.pair, matched.sequence, std::move(*mine));
}

void RankCalls::on(const OpenSet& open) {
  std::optional<Submission> mine;
  {
    std::lock_guard lock(mutex_);
    sets_.open(open.set, open.ranks);
    if (!is_pair(open.set)) {  // a pair's has no key
      setup_.recorder.open_set(open.set, open.ranks);
      mine = pending_.take(open.key);
    }
  }
  finish(std::move(mine), valued(open.set));
}

void RankCalls::on(const CloseSet& close) {
  std::optional<Submission> mine;
  {
    std::lock_guard lock(mutex_);
    setup_.recorder.close_set(close.set);
    sets_.close(close.set);
    mine = pending_.take(close.key);
  }
  finish(std::move(mine), valued(close.set));
}

void RankCalls::on(const Inform& inform) {
  if (inform.to != setup_.own) return;
  {
    std::lock_guard lock(mutex_);
    answers_[inform.number] = inform.text;
    // The asking thread may have given up, so old answers are dropped.
    if (answers_.size() > kMaxAnswers) answers_.erase(answers_.begin());
  }
  handles.announce();
}

// ---- Ends

void RankCalls::finish(std::optional<Submission> mine, Outcome outcome) {
  if (!mine) return;
  Ending ending{std::move(*mine), std::move(outcome)};
  settle({&ending, 1}, nullptr);
}

void RankCalls::free_name(const Submission& submission) {
  riders_ -= submission.rider;
  if (auto refusal = pending_.finish(submission)) {
    reporter_.send(*refusal);
    tell_join(submission.recorded.set);
  }
}

// Names are freed before handles complete, so that waiters can reuse them.
void RankCalls::settle(std::span<Ending> endings, const Failure* failure) {
  {
    std::lock_guard lock(mutex_);
    for (const Ending& ending : endings) {
      if (!ending.launched) free_name(ending.submission);
    }
  }
  const int64_t now = now_ns();
  for (Ending& ending : endings) {
    if (failure) ending.outcome.failure = *failure;
    const Failure& why = ending.outcome.failure;
    if (why) {
      setup_.recorder.failed(ending.submission.recorded, why);
      setup_.on_failure(why);
    } else {
      setup_.recorder.done(ending.submission.recorded, now);
    }
  }
  handles.finish_all([&](auto&& end) {
    for (Ending& ending : endings) end(ending.submission.handle, std::move(ending.outcome));
  });
}

void RankCalls::launch(Ending& ending, const std::shared_ptr<GpuEvent>& past) {
  {
    std::lock_guard lock(mutex_);
    free_name(ending.submission);
  }
  ending.launched = true;
  ending.outcome.past = past;
  handles.launch(ending.submission.handle, std::move(ending.outcome));
}

void RankCalls::break_down(const Failure& failure) {
  {
    std::lock_guard lock(mutex_);
    job.break_down(failure);
  }
  setup_.recorder.job_failed(failure);
  setup_.on_failure(failure);
}

void RankCalls::clear(const Failure& failure) {
  std::lock_guard lock(mutex_);
  pending_.clear();
  posted_.waiting.clear();
  riders_ = 0;
  sets_.clear_joins();
  handles.fail_all(failure);
}

}  // namespace farandole
