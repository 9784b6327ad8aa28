// SPDX-License-Identifier: Apache-2.0
#include "control/coordinator/messages.h"

#include <string>
#include <utility>

#include "base/error.h"

namespace farandole {
namespace {

// Repeats the checks that every rank makes before it reports. A failure means a bug in the rank that reported.
void check(const SetState& set, Rank from, const Post& post) {
  const Request& request = post.request;
  const Signature& s = request.signature;
  const bool sends = s.traits().end == End::kSender;
  const bool any = request.peer == kAnyRank && !sends;
  bool sound = s.traits().paired() && request.tag >= 0 && !is_pair(request.set);
  sound = sound && (any || (index_in(set.ranks, request.peer) >= 0 && request.peer != from));
  if (!post.refusal) {
    int64_t bytes = static_cast<int64_t>(size_of(s.dtype));
    sound = sound && s.shape.size() == 1 && s.shape[0] >= 0 &&
            !__builtin_mul_overflow(bytes, s.shape[0], &bytes) &&
            s.root == (sends ? from : request.peer) && post.contribution.has_input == sends &&
            request.more.empty() && Inputs::sound(s, post.contribution, 2);
  }
  if (!sound) throw Error(ErrorCode::kInternal, "a rank reported an impossible send or receive");
}

std::string size_text(const Signature& signature) {
  return std::to_string(signature.elements()) + " elements of " + name_of(signature.dtype) + " (" +
         std::to_string(signature.bytes()) + " bytes) on the " +
         (signature.device == kCpuDevice ? "CPU" : "GPU");
}

// Returns the reason why this send does not fit this receive, or kOk if it fits.
Failure mismatch(const Posted& sent, const Posted& received) {
  const Signature &a = sent.request().signature, &b = received.request().signature;
  if (a.dtype == b.dtype && a.shape == b.shape && a.device == b.device) return {};
  return {ErrorCode::kMismatch, "a send and its receive disagree: " + text_of(sent) + " has " +
                                    size_text(a) + ", " + text_of(received) + " has " +
                                    size_text(b) +
                                    "; give both the same dtype, number of elements and kind of "
                                    "device, or give different messages different tags"};
}

// Returns the reason why no rank can match this post any more, or kOk if a rank can. A rank that waits in join() cannot
// match the post, but it can once the leave of another rank has ended its join.
Failure hopeless(const SetState& set, const Posted& posted) {
  std::vector<Rank> joined, left;
  for (int m = 0; m < set.members(); ++m) {
    const Rank rank = set.rank_of(m), peer = posted.request().peer;
    if (rank == posted.rank || (peer != kAnyRank && rank != peer)) continue;
    const bool waits = set.left.empty() && set.joined.contains(m);
    if (!set.left.contains(m) && !waits) return {};
    (set.left.contains(m) ? left : joined).push_back(rank);
  }
  std::string text = text_of(posted) + " can't complete: ";
  if (!left.empty()) {
    text += text_of_ranks(left) + " finished normally and left; make a receive for every send";
  } else if (!joined.empty()) {
    text += text_of_ranks(joined) +
            " joined. Joined ranks can't send or receive until all ranks have joined; make the "
            "send and the receive before join()";
  } else {
    text += "the process set has no other rank";
  }
  return {ErrorCode::kPeer, std::move(text)};
}

Failure abandoned(Rank rank, const Posted& posted) {
  return {ErrorCode::kPeer, "rank " + std::to_string(rank) + " left, so its " + text_of(posted) +
                                " can't complete; wait for it before shutdown()"};
}

}  // namespace

void Messages::post(Rank from, const Post& post, int64_t now_ns) {
  const SetState* set = shared_.sets.of(post.request.set, from);
  Posted mine(from, post, now_ns);
  if (!set) return shared_.posts.fail(mine, removed(post.request.set));
  check(*set, from, post);
  stalls_.heard(from, now_ns);
  if (const auto other = shared_.posts.take_match(mine)) {
    return mine.sends() ? meet(mine, *other, now_ns) : meet(*other, mine, now_ns);
  }
  if (Failure failure = hopeless(*set, mine)) return shared_.posts.fail(mine, failure);
  stalls_.expect_progress(now_ns, now_ns);
  shared_.posts.add(std::move(mine));
}

void Messages::meet(const Posted& sent, const Posted& received, int64_t now_ns) {
  Failure failure = sent.post.refusal ? sent.post.refusal : received.post.refusal;
  if (!failure) failure = mismatch(sent, received);
  if (failure) {
    shared_.posts.fail(sent, failure);
    return shared_.posts.fail(received, failure);
  }
  SetState& pair = shared_.sets.pair(sent.rank, received.rank, shared_.outbox);
  const Request request{pair.id, {}, sent.request().signature};
  const uint64_t sequence = pair.first_unnamed + pair.unnamed.size();
  shared_.outbox.write(
      Matched{pair.id, sequence, sent.rank, sent.post.number, received.rank, received.post.number});
  Definition& definition = shared_.calls.registry().intern(request);
  Call& call = shared_.calls.slot(pair, definition, request, sequence);
  shared_.calls.open(pair, definition, call, request, sequence, now_ns);
  for (const Posted* end : {&sent, &received}) {
    call.arrive(pair.member_of(end->rank), request, true, {0, {}, 0, end->post.contribution});
  }
  publisher_.queue(pair, call);
}

void Messages::join(const SetState& set) {
  shared_.posts.fail_if([&](const Posted& posted) {
    return posted.request().set == set.id ? hopeless(set, posted) : Failure{};
  });
}

void Messages::leave(const SetState& set, Rank from) {
  shared_.posts.fail_if([&](const Posted& posted) {
    if (posted.request().set != set.id) return Failure{};
    // A refusal stays, because the other end may call later and must learn why it fails.
    const bool waits = posted.rank == from && !posted.post.refusal;
    return waits ? abandoned(from, posted) : hopeless(set, posted);
  });
}

}  // namespace farandole
