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

TEST(every_field_of_a_signature_must_agree) {
  Request common = tensor("x", {3, 400});
  auto change = [&](auto&& change_it) {
    Request odd = common;
    change_it(odd);
    return odd;
  };
  mismatch(common, tensor("x", {3, 401}), "shape is (3, 400) on %c, (3, 401) on %o");
  mismatch(common, tensor("x", {1200}), "shape is (3, 400) on %c, (1200,) on %o");
  mismatch(common, change([](Request& r) { r.signature.dtype = DType::kBFloat16; }),
           "dtype is float32 on %c, bfloat16 on %o");
  mismatch(common, change([](Request& r) { r.signature.op = Op::kReducescatter; }),
           "operation is allreduce on %c, reducescatter on %o");
  mismatch(common, change([](Request& r) { r.signature.reduce_op = ReduceOp::kMax; }),
           "reduce op is Sum on %c, Max on %o");
  mismatch(common, change([](Request& r) { r.signature.root = 1; }),
           "root rank is -1 on %c, 1 on %o");
  mismatch(common, change([](Request& r) { r.signature.prescale = 1 + 1e-15; }),
           "prescale factor is 1 on %c, 1.000000000000001 on %o");
  mismatch(common, change([](Request& r) { r.signature.postscale = 1e-9; }),
           "postscale factor is 1 on %c, 1e-09 on %o");
  mismatch(common, change([](Request& r) { r.signature.device = 0; }),
           "device is CPU on %c, GPU on %o");
  mismatch(common, grouped(common, 2), "group size is 1 on %c, 2 on %o");
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

TEST(reports_that_break_the_protocol_throw) {
  auto broken = [](auto&& act) {
    Job job(2);
    CHECK_THROWS(act(job), ErrorCode::kInternal);
  };
  broken([](Job& job) { job.report(0, Ready{99, {}, 0, input()}); });
  broken([](Job& job) { job.report(0, Join{0}), job.report(0, Join{0}); });
  broken([](Job& job) { job.report(0, Join{0}), job.submit(0, tensor("x")); });
  broken([](Job& job) { job.submit(0, in_set(tensor("x"), 1)); });  // the next one's number
  broken([](Job& job) {
    job.submit_all(add_set_of({0}), no_input());
    const SetId set = only<OpenSet>(job.publish()).set;
    job.submit(0, in_set(add_set_of({1}), set), no_input());
  });
  broken([](Job& job) { job.report(0, Done{0, 1}); });
  broken([](Job& job) { job.submit_all(tensor("x")), job.publish(), job.report(1, Done{0, 1}); });
  broken([](Job& job) { job.submit(0, with_op(tensor("x"), Op::kJoin)); });
  broken([](Job& job) { job.submit(0, tensor("x", {-5})); });
  broken([](Job& job) { job.report(0, Ready{0, grouped(tensor("x"), 2), 0, input()}); });
  broken([](Job& job) { job.submit(0, grouped(with_op(tensor("x"), Op::kBarrier), 2)); });
  broken([](Job& job) {
    Request odd = grouped(tensor("x"), 2);
    odd.more[0].shape = {-5};
    job.submit(0, odd);
  });
  broken([](Job& job) {
    Request odd = grouped(tensor("x"), 2);
    odd.more[0].device = 0;
    job.submit(0, odd);
  });
  broken([](Job& job) { job.submit(0, tensor("x", {int64_t{1} << 40, int64_t{1} << 40})); });
  broken([](Job& job) { job.submit(0, tensor("x", {3}), payload<float>({1, 2})); });
  broken([](Job& job) {
    job.submit(0, with_op(tensor("x", {1}), Op::kReducescatter), payload<float>({1}));
  });
  broken([](Job& job) { job.submit(0, tensor("x", {1025}), payload(std::vector<float>(1025))); });
  broken([](Job& job) {
    job.submit(0, with_op(tensor("x"), Op::kAllgather), {true, false, -1, {}, {}});
  });
  broken([](Job& job) {
    job.submit(0, with_op(tensor("x"), Op::kAlltoall), {true, false, 3, {3}, {}});
  });
  broken([](Job& job) {
    job.submit(0, with_op(tensor("x"), Op::kAlltoall), {true, false, 3, {2, 2}, {}});
  });
  broken([](Job& job) {  // without an input
    job.submit(0, with_op(tensor("x"), Op::kAlltoall), {false, false, 0, {0, 0}, {}});
  });
  broken([](Job& job) {
    Ready late{0, tensor(""), uint64_t{1} << 40, input()};
    job.report(0, late);
  });
  broken([](Job& job) {  // not in the set
    job.submit_all(add_set_of({0}), no_input());
    job.submit(1, in_set(tensor("x"), only<OpenSet>(job.publish()).set));
  });
  broken([](Job& job) { job.report(0, ReadyMany{{999}}); });
  broken([](Job& job) { job.coordinator().receive_all(job.host_of_all(), ReadyMany{{999}}, 0); });
  broken([](Job& job) { job.coordinator().receive_all(job.host_of_all(), Join{}, 0); });
  broken([](Job& job) {  // an unnamed call that is over already
    job.submit_all(tensor(""));
    job.publish();
    job.report(0, Ready{0, tensor(""), 0, input()});
  });
}

}  // namespace farandole
