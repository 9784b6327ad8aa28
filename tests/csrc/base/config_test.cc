// SPDX-License-Identifier: Apache-2.0
// Where settings come from: default < tuning file < environment, and rank 0's hold for the job.
#include "base/config.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "check.h"

using namespace farandole;

namespace {

// Variables of the environment and one tuning file, gone with the object.
struct Surroundings {
  std::filesystem::path folder;

  Surroundings() {
    char name[] = "/tmp/config_test.XXXXXX";
    folder = ::mkdtemp(name);
    ::setenv("XDG_CONFIG_HOME", folder.c_str(), 1);
    ::unsetenv("FARANDOLE_TUNING");
    ::unsetenv("FARANDOLE_BLOCK_BYTES");
    ::unsetenv("HOROVOD_FUSION_THRESHOLD");
  }
  ~Surroundings() {
    std::filesystem::remove_all(folder);
    ::setenv("FARANDOLE_TUNING", "none", 1);
  }
  std::string write(const std::string& text) const {
    std::filesystem::create_directories(folder / "farandole");
    std::string path = folder / "farandole" / "tuning.conf";
    std::ofstream(path) << text;
    return path;
  }
};

Source source_of(const Config& config, const std::string& name) {
  auto table = variables();
  for (size_t i = 0; i < table.size(); ++i) {
    if (table[i].name == name) return config.sources[i];
  }
  throw std::out_of_range(name);
}

std::string refusal(const char* says) {
  try {
    read_config();
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kInvalidArgument);
    CHECK(std::string(error.what()).find(says) != std::string::npos);
    return error.what();
  }
  throw std::runtime_error("accepted");
}

}  // namespace

TEST(numbers_that_cannot_be_meant_are_refused) {
  Surroundings here;
  for (const char* text : {"-1", "-4K"}) {
    ::setenv("FARANDOLE_BLOCK_BYTES", text, 1);
    refusal("is not a number from 1024 to 1073741824");
  }
  for (const char* text : {"99999999999999999999", "9999999999G", "1KiB", "4 M", "1.5M"}) {
    ::setenv("FARANDOLE_BLOCK_BYTES", text, 1);
    refusal("is not an integer below 2^63, optionally followed by K, M or G");
  }
  for (const char* text : {"3M", "3MB", "3072K", "3145728"}) {
    ::setenv("FARANDOLE_BLOCK_BYTES", text, 1);
    CHECK_EQ(read_config().block_bytes, 3 << 20);
  }
  ::setenv("FARANDOLE_SPIN_US", "-1", 1);
  CHECK_EQ(read_config().spin_us, -1);
  ::unsetenv("FARANDOLE_SPIN_US");
}

TEST(values_that_cannot_work_are_refused_by_their_name) {
  Surroundings here;
  const char* const wrong[][3] = {
      {"FARANDOLE_BLOCK_BYTES", "0", "'0' is not a number from 1024 to 1073741824"},
      {"FARANDOLE_STAGING_SLOTS", "1", "'1' is not a number from 2 to 64"},
      {"HOROVOD_CACHE_CAPACITY", "0", "HOROVOD_CACHE_CAPACITY='0' is not a number from 1 up"},
      {"FARANDOLE_PROCESS_SETS", "0", "'0' is not a number from 1 to"},
      {"FARANDOLE_CHECK_NUMERICS", "2", "is not a number from 0 to 1"},
      {"FARANDOLE_VERIFY_EVERY", "-1", "is not a number from 0 up"},
      {"FARANDOLE_STACK_SIGNAL", "99", "is not a number from -1 to 64"},
      {"FARANDOLE_WIRE", "rdma", "FARANDOLE_WIRE='rdma' is not one of auto, tcp, mpi"},
      {"FARANDOLE_WIRE", "", "FARANDOLE_WIRE='' is not one of auto, tcp, mpi"},
      {"FARANDOLE_WIRE", "auto, tcp", "is not one of"},
  };
  for (const auto& [name, text, says] : wrong) {
    ::setenv(name, text, 1);
    CHECK(refusal(says).find(name) != std::string::npos);
    ::unsetenv(name);
  }
}

TEST(the_file_of_the_configuration_directory_is_found) {
  Surroundings here;
  CHECK_EQ(read_config().tuning, "");
  CHECK_EQ(read_config().block_bytes, 512 << 10);
  std::string path = here.write("# a comment\n\n FARANDOLE_BLOCK_BYTES = 256K # behind\n");
  Config config = read_config();
  CHECK_EQ(config.tuning, path);
  CHECK_EQ(config.block_bytes, 256 << 10);
  CHECK(source_of(config, "FARANDOLE_BLOCK_BYTES") == Source::kTuning);
  CHECK(source_of(config, "FARANDOLE_STAGING_SLOTS") == Source::kDefault);
  ::setenv("FARANDOLE_TUNING", "none", 1);
  CHECK_EQ(read_config().block_bytes, 512 << 10);
}

TEST(the_environment_wins_over_the_file_under_both_names) {
  Surroundings here;
  here.write("FARANDOLE_BLOCK_BYTES = 256K\nFARANDOLE_FUSION_THRESHOLD = 8M\n");
  ::setenv("FARANDOLE_BLOCK_BYTES", "64K", 1);
  ::setenv("HOROVOD_FUSION_THRESHOLD", "4M", 1);
  Config config = read_config();
  CHECK_EQ(config.block_bytes, 64 << 10);
  CHECK_EQ(config.fusion_bytes, 4 << 20);
  CHECK(source_of(config, "FARANDOLE_BLOCK_BYTES") == Source::kEnvironment);
  ::unsetenv("FARANDOLE_BLOCK_BYTES");
  ::unsetenv("HOROVOD_FUSION_THRESHOLD");
}

TEST(job_wide_settings_are_those_of_rank_0) {
  Surroundings here;
  here.write("FARANDOLE_BLOCK_BYTES = 256K\n");
  Config zero = read_config();
  ::setenv("FARANDOLE_TUNING", "none", 1);
  Config other = read_config();
  apply_job_wide_text(other, job_wide_text(zero));
  CHECK_EQ(other.block_bytes, 256 << 10);
  CHECK(source_of(other, "FARANDOLE_BLOCK_BYTES") == Source::kRankZero);
  CHECK(source_of(other, "FARANDOLE_STAGING_SLOTS") == Source::kDefault);
}

// The stall monitor decides within 1.75 times its limit and 1.6 s, and only its error can name a rank.
TEST(a_silent_wire_is_given_more_time_than_the_stall_monitor_needs) {
  Config config{};
  CHECK_EQ(config.silence_limit(), 0.0);  // never
  for (double limit : {0.1, 1.0, 4.0, 300.0, 1e6}) {
    config.stall_abort = limit;
    CHECK(config.silence_limit() > 1.75 * limit + 1.6);
  }
}

// Where HOME is /tmp, anybody can put a file at the usual place. Only a file that the user names is asked for.
TEST(a_tuning_file_of_others_at_the_usual_place_is_not_used) {
  Surroundings here;
  const std::string path = here.write("FARANDOLE_BLOCK_BYTES = 256K\n");
  std::filesystem::permissions(path, std::filesystem::perms::all);
  CHECK(source_of(read_config(), "FARANDOLE_BLOCK_BYTES") == Source::kDefault);
  ::setenv("FARANDOLE_TUNING", path.c_str(), 1);
  refusal("can be written by other users");
}

TEST(a_wrong_tuning_file_is_an_error_that_says_why) {
  Surroundings here;
  here.write("FARANDOLE_BLOCK_BYTES\n");
  refusal("line 1 is not NAME = VALUE");
  here.write("FARANDOLE_BLOCK_BYTES = many\n");
  CHECK(refusal("'many' is not a number").find("tuning.conf") != std::string::npos);
  here.write("FARANDOLE_LOG_LEVEL = debug\n");  // of this rank: not for the job
  refusal("FARANDOLE_LOG_LEVEL is not a job-wide setting");
  ::setenv("FARANDOLE_TUNING", "/nowhere/at/all", 1);
  refusal("/nowhere/at/all: cannot be read");
}
