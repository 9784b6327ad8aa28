// SPDX-License-Identifier: Apache-2.0
// The handler that XLA calls on a CPU, with calls as XLA makes them: tensors, tokens, and what it can't read.
#include "api/xla_frame.h"

using namespace farandole;
using namespace farandole::check;

TEST(a_group_is_reduced_and_tokens_are_passed_over) {
  init_alone();
  for (size_t n : {size_t{1}, size_t{70'000}}) {
    Frame call(n);
    CHECK_EQ(call.run(), "");
    CHECK(call.results[0] == tripled(call.first));
    CHECK(call.results[1] == tripled(call.second));
  }
  shut_down();
}

TEST(a_result_of_another_shape_is_not_copied) {
  init_alone();
  Frame call(6);
  call.head[0] = FARANDOLE_ALLGATHER;
  CHECK_EQ(call.run(), "");
  CHECK(call.results[1] == call.second);
  std::vector<int64_t> shorter{5};
  call.outputs[0].shape = shorter.data();
  call.results[0].assign(6, -1);
  CHECK(contains(call.call(),
                 "farandole.MismatchError: allgather 'of a program': rank 0 gets shape (6,), but "
                 "its program has (5,)"));
  CHECK(told_code == xla::Code::kFailedPrecondition);
  CHECK(call.results[0] == Floats(6, -1));
  shut_down();
}

TEST(no_elements_need_no_memory) {
  init_alone();
  Frame call(0);
  call.run();
  for (xla::Buffer* buffer : {&call.tensors[0], &call.outputs[0]}) buffer->data = nullptr;
  CHECK_EQ(call.call(), "");
  shut_down();
}

TEST(the_core_s_errors_have_their_names) {
  Frame call(3);
  CHECK(contains(call.run(), "farandole.ShutdownError: farandole has not been initialized"));
  init_alone();
  call.dtypes[0] = FARANDOLE_BOOL;
  CHECK(contains(call.run(), "farandole.TypeError: "));
  CHECK(told_code == xla::Code::kInvalidArgument);
  call.dtypes[0] = FARANDOLE_FLOAT32;
  call.head[1] = 17;
  CHECK(
      contains(call.run(), "farandole.ValueError: allreduce 'of a program': unknown reduce op 17"));
  shut_down();
}

TEST(a_program_of_other_ranks_is_refused) {
  init_alone();
  Frame call(3);
  call.members = {0, 1};
  call.run();
  CHECK(contains(told, "compiled on rank 0 for ranks 0, 1, but runs on rank 0 with rank 0: "));
  call.members = {0};
  call.head[4] = 1;
  CHECK(contains(call.run(), "compiled on rank 1 for"));
  call.head[4] = 0;
  CHECK_EQ(call.run(), "");
  shut_down();
}

TEST(a_call_is_made_in_the_process_set_of_its_program) {
  LocalBootstrap bootstrap(2);
  run_in_forks(2, [&](int rank) {
    init_by_abi(bootstrap, rank, {0, 0});
    int64_t handle = 0;
    CHECK_EQ(submit_by_abi({FARANDOLE_ADD_SET, {1}, nullptr, nullptr, ""}, handle), FARANDOLE_OK);
    CHECK_EQ(farandole_wait(&handle, 1, 60), FARANDOLE_OK);
    farandole_result added{};
    CHECK_EQ(farandole_result_of(handle, &added), FARANDOLE_OK);
    const int64_t world = farandole_count_unnamed(0);
    if (rank == 1) {
      Frame call(3);
      call.head[3] = static_cast<int32_t>(added.value);
      call.head[4] = rank;
      call.members = {rank};
      call.name.clear();
      CHECK_EQ(call.run(), "");
      CHECK(call.results[1] == tripled(call.second));
    }
    CHECK_EQ(farandole_count_unnamed(0), world);
    shut_down();
  });
}

// The call holds the runtime while XLA is asked for a stream.
TEST(no_job_starts_before_the_last_call_of_the_one_before_has_ended) {
  init_alone();
  Frame call(3);
  call.handler = farandole_xla_collective_on;
  call.api.stream_of = [](xla::StreamArguments*) {
    char peer_info[4096];
    do {
      CHECK_EQ(farandole_shutdown(0, "", 0.01), FARANDOLE_PENDING);
      CHECK_EQ(farandole_prepare(peer_info, sizeof peer_info), -FARANDOLE_E_ARGUMENT);
    } while (contains(farandole_error(), "init() was called already"));  // this rank still leaves
    CHECK(contains(farandole_error(), "the last shutdown() has not ended yet"));
    return reinterpret_cast<xla::Error*>(&destroyed);
  };
  CHECK(contains(call.run(), "it gives no stream"));
  shut_down();
}

TEST(what_can_not_be_read_is_an_error) {
  init_alone();
  Frame call(3);
  CHECK_EQ(call.run(), "");
  call.api.version.major = 1;
  CHECK(contains(call.call(), "farandole.LibraryError: this version of XLA"));
  call.api.version.major = 0;
  call.frame.size = sizeof call.frame - sizeof(void*);
  CHECK(contains(call.call(), "shorter than that of version 0.1"));
  call.frame.size = sizeof call.frame;
  call.labels[0].length = 3;
  CHECK(contains(call.call(), "it lacks the attribute call"));
  call.labels[0].length = 4;
  call.numbers[0].type = xla::kFloat64;
  CHECK(contains(call.call(), "in call"));
  call.numbers[0].type = xla::kInt32;
  call.frame.results.count = 2;
  CHECK(contains(call.call(), "it lacks a tensor"));
  shut_down();
}

TEST(it_tells_its_version_and_does_nothing_else) {
  Frame call(3);
  call.run();
  xla::Metadata metadata{sizeof metadata, {sizeof(xla::Version), nullptr, -1, -1}, 0};
  xla::MetadataExtension asks{{sizeof asks, xla::kMetadataExtension, nullptr}, &metadata};
  call.frame.extensions = &asks.base;
  CHECK_EQ(call.call(), "");
  CHECK_EQ(metadata.version.major, 0);
  CHECK_EQ(metadata.version.minor, 1);
  call.frame.extensions = nullptr;
  call.frame.stage = 1;
  CHECK_EQ(call.call(), "");
}
