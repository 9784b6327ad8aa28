// SPDX-License-Identifier: Apache-2.0
#include "runtime/calls/rank_calls.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "runtime/calls/parts.h"

namespace farandole {
namespace {

// True if the inputs of this batch may travel in reports. That saves a round trip, but is slower for many calls. A
// batch sends either all of its inputs in reports or none, so that all ranks add in the same order. In jobs of several
// hosts, buckets add in a different order, so the caller passes 0 as `under_way`, which depends on timing.
bool rides_along(std::span<const PreparedSubmission> batch, size_t under_way, size_t most_bytes) {
  constexpr size_t kMany = 8;
  auto small = [&](const PreparedSubmission& one) {
    const Submission& call = one.call->submission;
    uint64_t bytes = call.recorded.bytes;
    for (const Submission& other : call.more) bytes += other.recorded.bytes;
    return bytes <= most_bytes;
  };
  return under_way + batch.size() < kMany && std::ranges::all_of(batch, small);
}

// Calls visit(set) once for each run of consecutive calls of one set.
template <class Visit>
void for_each_set(std::span<const PreparedSubmission> batch, Visit&& visit) {
  for (size_t i = 0; i < batch.size(); ++i) {
    const SetId set = batch[i].call->request.set;
    if (i == 0 || set != batch[i - 1].call->request.set) visit(set);
  }
}

Outcome valued(int64_t value) {
  Outcome outcome;
  outcome.value = value;
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
  for (size_t i = 0; i < inputs.size(); ++i) {
    Submission& mine = i == 0 ? made : made.more[i - 1];
    mine.input = reinterpret_cast<const std::byte*>(inputs[i]);
    mine.output = reinterpret_cast<std::byte*>(outputs[i]);
    if (!streams.empty()) mine.stream = streams[i];
    if (!produced.empty()) mine.produced = produced[i];
  }
  return made;
}

void RankCalls::check_open() const {
  // Checks left() first, because the job of a rank that has left also ends with a failure.
  if (job.left()) throw Error(ErrorCode::kShutdown, "this rank has shut down; call init() first");
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

// Fills in the data that the recorder stores.
void RankCalls::describe(CheckedCall& call) {
  const Request& request = call.request;
  for (size_t i = 0; i < request.parts(); ++i) {
    const Signature& signature = request.part(i);
    Submission& mine = call.submission.part(i);
    const std::string place = "_" + std::to_string(i + 1) + "of" + std::to_string(request.parts());
    const bool first = i == 0 || request.name.empty();
    RecordedCall& recorded = mine.recorded;
    recorded.name = setup_.recorder.label_of(first ? request.name : request.name + place);
    recorded.site = setup_.recorder.label_of(call.site);
    recorded.set = request.set;
    recorded.op = signature.op;
    recorded.dtype = signature.dtype;
    recorded.peer = request.peer;
    recorded.tag = request.tag;
    if (!signature.traits().moves_bytes()) continue;
    recorded.bytes = size_of(signature.dtype);
    for (int64_t n : mine.shape) recorded.bytes *= static_cast<uint64_t>(n);
  }
}

void RankCalls::submit(std::span<PreparedSubmission> batch) {
  std::exception_ptr error;
  std::unique_lock lock(mutex_);
  for_each_set(batch, [&](SetId set) { direct_.clear(lock, set); });
  check_open();
  const bool rides = rides_along(batch, setup_.one_host ? riders_ : 0, setup_.tiny_bytes);
  try {
    for (PreparedSubmission& one : batch) enter(one, rides);
  } catch (...) {
    error = std::current_exception();
  }
  for_each_set(batch, [this](SetId set) { DirectCalls::tell(sets_.find(set)); });
  reporter_.pass_batch();
  if (error) std::rethrow_exception(error);
}

bool RankCalls::call(PreparedSubmission& prepared) {
  const Request& request = prepared.call->request;
  std::unique_lock lock(mutex_);
  direct_.clear(lock, request.set);
  check_open();
  Submission mine = checked(prepared);
  note(request, mine, prepared.handles);
  if (const auto visit = direct_.enter(*prepared.call, mine)) {
    lock.unlock();
    const bool met = direct_.meet(*visit, request, mine);
    lock.lock();
    const DirectCalls::Next next = direct_.leave(request, mine, met);
    if (next == DirectCalls::Next::kEnded) return met;
    if (next == DirectCalls::Next::kFails) {
      lock.unlock();
      Ending ending{std::move(mine), {}};
      const Failure removed = gone(request.set);
      settle({&ending, 1}, &removed);
      return false;
    }
  }
  const bool rides = rides_along({&prepared, 1}, setup_.one_host ? riders_ : 0, setup_.tiny_bytes);
  enter(request, std::move(mine), rides);
  DirectCalls::tell(sets_.find(request.set));
  reporter_.pass_batch();
  return false;
}

void RankCalls::prepare(CheckedCall& call) {
  std::lock_guard lock(mutex_);
  check_open();
  describe(call);
  call.submission.prepared = ++prepared_;
}

Submission RankCalls::checked(PreparedSubmission& prepared) {
  const Request& request = prepared.call->request;
  Submission submission = prepared.submission();
  const ProcessSet& set = working_set(request, sets_);
  // Messages are not matched by name.
  if (!request.signature.traits().paired()) {
    pending_.check_free(request, submission, prepared.call->record);
  }
  try {
    for (size_t i = 0; i < request.parts(); ++i) {
      check_buffers(request, i, submission.part(i), set);
      const Handle user = memory_.user_of(request.part(i), submission.part(i), set);
      if (user != 0) refuse_in_use(title_of(request) + ": ", find_key(user));
    }
  } catch (const Error& e) {
    tell_refusal(request, {e.code(), e.what()});
    throw;
  }
  return submission;
}

void RankCalls::enter(PreparedSubmission& prepared, bool rides) {
  const Request& request = prepared.call->request;
  Submission submission = checked(prepared);
  note(request, submission, prepared.handles);
  enter(request, std::move(submission), rides);
}

// Creates the tensors' handles and records the submission.
void RankCalls::note(const Request& request, Submission& submission, std::span<Handle> made) {
  uint64_t sequence = request.name.empty() ? pending_.next_unnamed(request.set) : 0;
  if (request.signature.traits().paired()) sequence = posted_.next;
  for (size_t i = 0; i < request.parts(); ++i) {
    Submission& mine = submission.part(i);
    if (!gets_result(request.part(i), setup_.own)) mine.output = nullptr;
    mine.handle = handles.create(mine.recorded.name, mine.device != kCpuDevice);
    made[i] = mine.recorded.call = mine.handle;
    setup_.recorder.submitted(mine.recorded, sequence, mine.shape);
  }
}

// Reports a call. If `rides` is true, the call's inputs may travel in the report.
void RankCalls::enter(const Request& request, Submission submission, bool rides) {
  const bool paired = request.signature.traits().paired();
  ProcessSet& its = sets_.own(request.set);
  submission.counted = !paired;  // the call counts as under way until the log has settled it
  its.under_way += submission.counted;
  for (size_t i = 0; i < request.parts(); ++i)
    memory_.add(request.part(i), submission.part(i), its);
  if (request.signature.op == Op::kJoin) {
    its.join = submission.recorded;
    return reporter_.send(Join{request.set, std::exchange(its.join_failure, {})});
  }
  auto part = [&](size_t i) {
    return contribution_of(request.part(i), submission.part(i), setup_.own, setup_.tiny_bytes);
  };
  Contribution given = part(0);
  std::vector<Contribution> more;
  for (size_t i = 1; i < request.parts(); ++i) more.push_back(part(i));
  auto strays = [](const Contribution& one) { return one.has_input && !one.has_payload; };
  submission.rider = given.has_payload && !paired && std::ranges::none_of(more, strays);
  riders_ += submission.rider;
  if (!rides || strays(given) || std::ranges::any_of(more, strays)) {
    given.drop_payload();
    std::ranges::for_each(more, &Contribution::drop_payload);
  }
  if (paired) {
    const uint64_t number = posted_.next++;
    posted_.waiting.emplace(number, std::move(submission));
    return reporter_.pass(Post{request, number, std::move(given)});
  }
  if (const uint32_t id = pending_.submit_known(request, submission)) {
    return reporter_.pass_known(id, std::move(given), std::move(more));
  }
  Ready ready{0, {}, 0, std::move(given), std::move(more)};
  pending_.submit(request, std::move(submission), ready);
  reporter_.pass(ready);
}

void RankCalls::refuse(const Request& request, const Failure& why) {
  std::unique_lock lock(mutex_);
  direct_.clear(lock, request.set);
  check_open();
  tell_refusal(request, why);
}

// Reports a refused call. If the call is a join(), keeps the failure and reports it when this rank does join, because a
// join ends only when all ranks have joined. Reports a refused message only if its peer is known.
void RankCalls::tell_refusal(const Request& request, const Failure& why) {
  ProcessSet* set = sets_.find(request.set);
  if (!set || set->member < 0 || set->joined() || is_pair(request.set)) return;
  if (by_members(request) && request.signature.shape.empty()) return;  // it is not known who waits
  Failure failure{why.code, "rank " + std::to_string(setup_.own) + " refused: " + why.text};
  const CollectiveTraits& traits = request.signature.traits();
  if (request.signature.op == Op::kJoin) {
    set->join_failure = std::move(failure);
  } else if (traits.paired()) {
    const bool any = request.peer == kAnyRank && traits.end == End::kReceiver;
    const bool known = any || (set->member_of(request.peer) >= 0 && request.peer != setup_.own);
    if (!known || request.tag < 0) return;
    reporter_.pass(Post{request, posted_.next++, {}, std::move(failure)});
  } else {
    reporter_.pass(pending_.refuse(request, std::move(failure)));
    if (set->cell) set->cell->disturb();
  }
}

void RankCalls::close() {
  std::unique_lock lock(mutex_);
  direct_.clear(lock);
}

uint64_t RankCalls::count_unnamed(SetId set) {
  std::lock_guard lock(mutex_);
  check_open();
  const ProcessSet* its = sets_.find(set);
  return pending_.next_unnamed(set) + (its ? its->unnamed_in_cell : 0);
}

// ---- Questions

std::optional<CallKey> RankCalls::find_key(Handle handle) const {
  if (const auto number = posted_.number_of(handle)) {
    return CallKey{posted_.waiting.at(*number).recorded.set, {}, *number, setup_.own};
  }
  return pending_.key_of(handle);
}

std::optional<CallKey> RankCalls::key_of(Handle handle) {
  std::lock_guard lock(mutex_);
  return find_key(handle);
}

uint64_t RankCalls::ask(Handle handle) {
  std::lock_guard lock(mutex_);
  std::optional<SetId> joined = sets_.joined_by(handle);
  std::optional<CallKey> key = find_key(handle);
  if (joined) key = CallKey{*joined, "", 0};
  if (!key) return 0;
  const uint64_t number = ++asked_;
  reporter_.pass(Inquire{number, *key, joined.has_value()});
  return number;
}

void RankCalls::ping() {
  std::lock_guard lock(mutex_);
  reporter_.pass(Inquire{});
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

// Makes the bucket's parts, and allocates outputs whose size is known only from the log.
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
  const int64_t now = now_ns();
  BegunRun made{{run.set, run.bucket, run.gpu}, set.member == 0, set.ranks, now};
  made.parts.reserve(items.size());
  made.endings.reserve(items.size());
  if (labelled) made.label = label_of(run.bucket, items, pending_);
  auto add = [&](const PartInputs& inputs, const Signature& signature, Submission* mine) {
    Part part = part_of(inputs, signature, set, mine);
    const bool absent =
        std::cmp_equal(inputs.absent.size(), set.members());  // no rank has this tensor
    if (mine) {
      Outcome outcome = outcome_of(part.signature, part.rows, set, *mine, device);
      outcome.absent = absent;
      setup_.recorder.negotiated(mine->recorded, run.bucket, log_position, now);
      part.output = outcome.output;
      made.endings.push_back({std::move(*mine), std::move(outcome)});
    }
    if (absent) return;
    made.bytes += part.signature.bytes();
    made.parts.push_back(std::move(part));
  };
  for (size_t i = 0; i < items.size(); ++i) {
    const Request& request = pending_.request_of(items[i].id);
    std::optional<Submission>& mine = taken[i];
    std::vector<Submission> more;
    if (mine) more.swap(mine->more);
    add(items[i].inputs, request.signature, mine ? &*mine : nullptr);
    for (size_t k = 1; k < request.parts(); ++k) {
      add(items[i].part(k), request.part(k), mine ? &more[k - 1] : nullptr);
    }
  }
  return made;
}

void RankCalls::on(const Result& result, uint64_t log_position,
                   const std::shared_ptr<GpuDevice>& device) {
  {
    std::lock_guard lock(mutex_);
    ProcessSet* set = sets_.find(result.set);
    if (!set || set->member < 0) return;
    std::optional<Submission> mine = pending_.take(result.id, result.sequence);
    if (!mine) {
      ++set->ended;
      return DirectCalls::tell(set);
    }
    const Request& request = pending_.request_of(result.id);
    end(std::move(*mine));
    std::span<const int64_t> rows = result.rows;
    for (size_t i = 0; i < endings_.size(); ++i) {
      auto& [one, outcome, launched] = endings_[i];
      setup_.recorder.negotiated(one.recorded, 0, log_position, now_ns());
      const Signature& signature = request.part(i);
      const size_t logged = signature.traits().logged_rows(static_cast<size_t>(set->members()));
      const auto own = rows_of(rows.first(logged), signature, set->members());
      rows = rows.subspan(logged);
      outcome = outcome_of(signature, own, *set, one, device);
      outcome.absent = result.absent;
    }
  }
  const std::byte* payload = result.payload.data();
  for (Ending& ending : endings_) {
    if (result.payload.empty()) break;
    const size_t bytes = ending.bytes();
    if (ending.outcome.output) std::memcpy(ending.outcome.output, payload, bytes);
    payload += bytes;
  }
  settle(endings_, nullptr, result.set);
}

// The set may have been removed already if a report of this rank came too late.
void RankCalls::on(const Fail& fail) {
  if (std::ranges::count(fail.unheard, setup_.own) > 0) return;
  if (fail.key.posted() && fail.key.poster != setup_.own) return;
  std::optional<Submission> mine;
  {
    std::lock_guard lock(mutex_);
    mine = fail.key.posted() ? posted_.take(fail.key.sequence) : pending_.fail(fail.key);
  }
  if (mine) this->fail(std::move(*mine), fail.failure);
}

void RankCalls::on(const Joined& joined) {
  Submission mine;
  {
    std::lock_guard lock(mutex_);
    ProcessSet* set = sets_.find(joined.set);
    if (!set || set->member < 0) return;
    mine.recorded = std::exchange(set->join, {});
    mine.counted = true;
    if (mine.recorded.call == 0) return;  // this rank has not joined
    pending_.resume(joined.set, joined.next_sequence);
  }
  mine.handle = mine.recorded.call;
  if (joined.failure) return fail(std::move(mine), joined.failure);
  finish(std::move(mine), valued(joined.last));
}

void RankCalls::on(const Matched& matched) {
  const bool sends = matched.sender == setup_.own;
  if (!sends && matched.receiver != setup_.own) return;
  std::lock_guard lock(mutex_);
  std::optional<Submission> mine = posted_.take(sends ? matched.sent : matched.received);
  if (!mine) return;
  mine->value = matched.sender;
  mine->recorded.set = matched.pair;  // the message's bytes move in the pair's buckets
  pending_.submit(matched.pair, matched.sequence, std::move(*mine));
}

void RankCalls::on(const OpenSet& open) {
  std::optional<Submission> mine;
  {
    std::lock_guard lock(mutex_);
    sets_.open(open.set, open.ranks);
    if (!is_pair(open.set)) {  // no call asks for a pair
      setup_.recorder.open_set(open.set, open.ranks);
      mine = pending_.take(open.key);
    }
  }
  finish(std::move(mine), valued(open.set));
}

void RankCalls::use(SetId set, std::shared_ptr<Cell> cell) {
  std::lock_guard lock(mutex_);
  sets_.own(set).cell = std::move(cell);
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

void RankCalls::on(const Answer& answer) {
  if (answer.to != setup_.own) return;
  {
    std::lock_guard lock(mutex_);
    answers_[answer.number] = answer.text;
    constexpr size_t kMost = 64;  // threads that have asked may have stopped waiting
    if (answers_.size() > kMost) answers_.erase(answers_.begin());
  }
  handles.announce();
}

// ---- Ends

void RankCalls::end(Submission call) {
  std::vector<Submission> more = std::move(call.more);
  endings_.clear();
  endings_.push_back({std::move(call), {}});
  for (Submission& other : more) endings_.push_back({std::move(other), {}});
}

void RankCalls::finish(std::optional<Submission> mine, Outcome outcome) {
  if (!mine) return;
  end(std::move(*mine));
  endings_.front().outcome = std::move(outcome);
  settle(endings_, nullptr);
}

void RankCalls::fail(Submission mine, const Failure& failure) {
  end(std::move(mine));
  settle(endings_, &failure);
}

void RankCalls::free_name(const Submission& submission) {
  riders_ -= submission.rider;
  memory_.remove(submission);
  pending_.finish(submission);
  if (!submission.counted) return;
  if (ProcessSet* set = sets_.find(submission.recorded.set)) --set->under_way;
}

// Frees the names before it completes the handles, so that waiters can use the names again.
void RankCalls::settle(std::span<Ending> endings, const Failure* failure,
                       std::optional<SetId> set) {
  const uint64_t ended = set ? 1 : 0;
  {
    std::lock_guard lock(mutex_);
    for (const Ending& ending : endings) {
      if (!ending.launched) free_name(ending.submission);
    }
    if (!set && !endings.empty()) set = endings.front().submission.recorded.set;
    ProcessSet* its = set ? sets_.find(*set) : nullptr;
    if (its) its->ended += ended;
    DirectCalls::tell(its);
  }
  const int64_t now = now_ns();
  for (Ending& ending : endings) {
    if (failure) ending.outcome.failure = *failure;
    const Failure& why = ending.outcome.failure;
    if (why) {
      setup_.recorder.failed(ending.submission.recorded, why);
    } else {
      setup_.recorder.done(ending.submission.recorded, now);
    }
  }
  handles.finish_all([&](auto&& end) {
    for (Ending& ending : endings) end(ending.submission.handle, std::move(ending.outcome));
  });
}

void RankCalls::launched(BegunRun& run) {
  run.launched_ns =
      setup_.recorder.launched(run.done.set, run.done.bucket, run.parts.size(), run.bytes);
}

void RankCalls::settle(BegunRun& run, const Failure* failure) {
  if (!failure) setup_.recorder.moved(run.done.set, run.done.bucket, run.bytes, run.launched_ns);
  settle(run.endings, failure, run.done.set);
  if (run.reports && !failure) report(run.done);
}

void RankCalls::launch(BegunRun& run, const std::shared_ptr<GpuEvent>& past) {
  launched(run);
  std::unique_lock lock(mutex_);
  for (const Ending& ending : run.endings) free_name(ending.submission);
  lock.unlock();
  for (Ending& ending : run.endings) {
    ending.launched = true;
    ending.outcome.past = past;
    handles.launch(ending.submission.handle, std::move(ending.outcome));
  }
}

void RankCalls::break_down(const Failure& failure) {
  {
    std::lock_guard lock(mutex_);
    job.break_down(failure);
  }
  setup_.recorder.job_failed(failure);
}

void RankCalls::clear(const Failure& failure) {
  std::lock_guard lock(mutex_);
  pending_.clear();
  posted_.waiting.clear();
  memory_.clear();
  riders_ = 0;
  sets_.clear_under_way();
  handles.fail_all(failure);
}

}  // namespace farandole
