// SPDX-License-Identifier: Apache-2.0
// The coordinator, rule by rule: ranks that disagree, that refuse, or that are broken.
#include "control/coordinator/coordinator_harness.h"

namespace farandole {
namespace {

Failure failure_of(Job& job, const std::vector<Request>& by_rank) {
  for (size_t r = 0; r < by_rank.size(); ++r) job.submit(static_cast<Rank>(r), by_rank[r]);
  return only<Fail>(job.publish()).failure;
}

// The text of what two, then four ranks read when the last one differs.
void mismatch(const Request& common, const Request& odd, const std::string& difference) {
  for (int size : {2, 4}) {
    Job job(size);
    std::vector<Request> requests(static_cast<size_t>(size), common);
    requests.back() = odd;
    Failure failure = failure_of(job, requests);
    CHECK(failure.code == ErrorCode::kMismatch);
    contains(failure.text, "'x'");
    std::string text = difference;
    text.replace(text.find("%c"), 2, size == 2 ? "rank 0" : "ranks 0-2");
    text.replace(text.find("%o"), 2, "rank " + std::to_string(size - 1));
    contains(failure.text, text);
    job.submit_all(common);  // usable as before
    CHECK_EQ(kinds(job.publish()), "define run");
  }
}

}  // namespace

struct Oddity {
  void (*make)(Request& request);
  const char* difference;
};

TEST(every_field_of_a_signature_must_agree) {
  constexpr Oddity kOddities[] = {
      {[](Request& r) { r.signature.shape = {3, 401}; }, "shape is (3, 400) on %c, (3, 401) on %o"},
      {[](Request& r) { r.signature.shape = {1200}; }, "shape is (3, 400) on %c, (1200,) on %o"},
      {[](Request& r) { r.signature.dtype = DType::kBFloat16; },
       "dtype is float32 on %c, bfloat16 on %o"},
      {[](Request& r) { r.signature.op = Op::kReducescatter; },
       "operation is allreduce on %c, reducescatter on %o"},
      {[](Request& r) { r.signature.reduce_op = ReduceOp::kMax; },
       "reduce op is Sum on %c, Max on %o"},
      {[](Request& r) { r.signature.root = 1; }, "root rank is -1 on %c, 1 on %o"},
      {[](Request& r) { r.signature.prescale = 1 + 1e-15; },
       "prescale factor is 1 on %c, 1.000000000000001 on %o"},
      {[](Request& r) { r.signature.postscale = 1e-9; },
       "postscale factor is 1 on %c, 1e-09 on %o"},
      {[](Request& r) { r.signature.device = 0; }, "device is CPU on %c, GPU on %o"},
      {[](Request& r) { r = grouped(r, 2); }, "group size is 1 on %c, 2 on %o"}};
  for (const Oddity& oddity : kOddities) {
    const Request common = tensor("x", {3, 400});
    Request odd = common;
    oddity.make(odd);
    mismatch(common, odd, oddity.difference);
  }
}

TEST(who_makes_a_set_must_be_agreed) {
  Job job(2);
  job.submit(0, add_set_of({0, 1}, "x"), no_input());
  job.submit(1, form_set_of({0, 1}, "x"), no_input());
  contains(only<Fail>(job.publish()).failure.text,
           "the set of callers is all ranks on rank 0, its members on rank 1");
}

TEST(a_mismatch_names_every_opinion) {
  Job job(6);
  Failure failure = failure_of(job, {tensor("x", {1}), tensor("x", {2}), tensor("x", {1}),
                                     tensor("x", {3}), tensor("x", {2}), tensor("x", {1})});
  contains(failure.text, "shape is (1,) on ranks 0, 2, 5, (2,) on ranks 1, 4, (3,) on rank 3");
}

TEST(submissions_that_break_the_protocol_throw) {
  Request negative = grouped(tensor("x"), 2), elsewhere = negative;
  negative.more[0].shape = {-5};
  elsewhere.more[0].device = 0;
  const Request deal = with_op(tensor("x"), Op::kAlltoall);
  const std::vector<float> one(1), two(2), many(1025);
  const std::pair<Request, Contribution> broken[] = {
      {in_set(tensor("x"), 1), input()},  // the next one's number
      {with_op(tensor("x"), Op::kJoin), input()},
      {tensor("x", {-5}), input()},
      {grouped(with_op(tensor("x"), Op::kBarrier), 2), input()},
      {negative, input()},
      {elsewhere, input()},
      {tensor("x", {int64_t{1} << 40, int64_t{1} << 40}), input()},
      {tensor("x", {3}), payload(two)},
      {with_op(tensor("x", {1}), Op::kReducescatter), payload(one)},
      {tensor("x", {1025}), payload(many)},
      {with_op(tensor("x"), Op::kAllgather), {true, false, -1, {}, {}}},
      {deal, {true, false, 3, {3}, {}}},
      {deal, {true, false, 3, {2, 2}, {}}},
      {deal, {false, false, 0, {0, 0}, {}}}};  // without an input
  for (const auto& [request, given] : broken) {
    CHECK_THROWS(Job(2).submit(0, request, given), ErrorCode::kInternal);
  }
}

TEST(reports_that_break_the_protocol_throw) {
  auto broken = [](auto&& act) {
    Job job(2);
    CHECK_THROWS(act(job), ErrorCode::kInternal);
  };
  broken([](Job& job) { job.report(0, Ready{99, {}, 0, input()}); });
  broken([](Job& job) { job.play("0. 0."); });
  broken([](Job& job) { job.play("0. 0+x"); });
  broken([](Job& job) {
    const SetId set = job.add_set({0});
    job.submit(0, in_set(add_set_of({1}), set), no_input());
  });
  broken([](Job& job) { job.report(0, Done{0, 1}); });
  broken([](Job& job) { job.play("*+x"), job.report(1, Done{0, 1}); });
  broken([](Job& job) { job.report(0, Ready{0, grouped(tensor("x"), 2), 0, input()}); });
  broken([](Job& job) { job.report(0, Ready{0, tensor(""), uint64_t{1} << 40, input()}); });
  broken([](Job& job) {  // not in the set
    job.submit(1, in_set(tensor("x"), job.add_set({0})));
  });
  broken([](Job& job) { job.report(0, ReadyMany{{999}}); });
  broken([](Job& job) { job.coordinator().receive_all(job.host_of_all(), ReadyMany{{999}}, 0); });
  broken([](Job& job) { job.coordinator().receive_all(job.host_of_all(), Join{}, 0); });
  broken([](Job& job) {  // an unnamed call that is over already
    job.play("*+");
    job.report(0, Ready{0, tensor(""), 0, input()});
  });
}

}  // namespace farandole
