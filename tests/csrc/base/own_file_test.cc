// SPDX-License-Identifier: Apache-2.0
// Which users and files a rank trusts.
#include "base/own_file.h"

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "folder.h"

namespace farandole::check {
namespace {

namespace fs = std::filesystem;

constexpr uid_t kStranger = 65534;
constexpr const char* kChosen =
    "no: is a link that another user may have made, or lies in another user's folder";

// The text, or why it is not trusted.
std::string outcome(const std::string& path) {
  std::string why;
  return read_own_file(path, why).value_or("no: " + why);
}

void write(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

}  // namespace

TEST(a_file_that_only_its_user_may_write_is_read) {
  const Folder folder;
  const std::string file = folder.path("file");
  write(file, "precious");
  CHECK_EQ(chmod(file.c_str(), 0600), 0);
  CHECK_EQ(outcome(file), "precious");
  fs::create_symlink("file", folder.path("link"));
  CHECK_EQ(outcome(folder.path("link")), "precious");
  CHECK_EQ(outcome(folder.path("none")), "no: ");
  CHECK_EQ(outcome(""), "no: ");
}

TEST(what_others_may_write_is_refused) {
  const Folder folder;
  const std::string file = folder.path("file");
  write(file, "planted");
  for (const mode_t mode : {0664, 0646}) {
    CHECK_EQ(chmod(file.c_str(), mode), 0);
    CHECK_EQ(outcome(file), "no: can be written by other users: chmod go-w");
  }
  CHECK_EQ(chmod(file.c_str(), 0600), 0);
  if (geteuid() != 0) skip("needs root, to be two users");
  CHECK_EQ(chown(file.c_str(), kStranger, kStranger), 0);
  CHECK_EQ(outcome(file), "no: belongs to user 65534");
}

// Another user who may write to the folder chooses among this user's files by a link.
TEST(a_file_of_ones_own_that_others_have_chosen_is_refused) {
  const Folder folder;
  const std::string file = folder.path("file");
  write(file, "precious");
  CHECK_EQ(chmod(file.c_str(), 0600), 0);
  fs::create_symlink("file", folder.path("link"));
  for (const mode_t mode : {0775, 01777}) {
    CHECK_EQ(chmod(folder.path("").c_str(), mode), 0);
    CHECK_EQ(outcome(folder.path("link")), kChosen);
    CHECK_EQ(outcome(file), "precious");
  }
  CHECK_EQ(chmod(folder.path("").c_str(), 0755), 0);
  if (geteuid() != 0) skip("needs root, to be two users");
  CHECK_EQ(chown(folder.path("").c_str(), kStranger, kStranger), 0);
  CHECK_EQ(outcome(file), kChosen);
}

// The folder of the file is this user's own, and a link above it chooses which one.
TEST(a_folder_that_others_have_chosen_is_refused) {
  const Folder folder;
  for (const char* name : {"all", "own", "own/deep"}) {
    CHECK_EQ(mkdir(folder.path(name).c_str(), 0755), 0);
  }
  write(folder.path("own/deep/file"), "precious");
  CHECK_EQ(chmod(folder.path("own/deep/file").c_str(), 0600), 0);
  const std::string link = folder.path("all/link");
  for (const std::string& target :
       {folder.path("own"), std::string("../own"), std::string("back")}) {
    fs::create_symlink(target, link);
    if (target == "back") fs::create_symlink("../own", folder.path("all/back"));
    for (const mode_t mode : {0755, 01777, 0777}) {  // in the last one others can have moved it
      CHECK_EQ(chmod(folder.path("all").c_str(), mode), 0);
      CHECK_EQ(outcome(link + "/deep/file"), mode == 0777 ? kChosen : "precious");
    }
    if (geteuid() == 0) {
      CHECK_EQ(chmod(folder.path("all").c_str(), 01777), 0);
      const std::string planted = target == "back" ? folder.path("all/back") : link;
      CHECK_EQ(lchown(planted.c_str(), kStranger, kStranger), 0);
      CHECK_EQ(outcome(link + "/deep/file"), kChosen);
    }
    fs::remove(link);
  }
  fs::create_symlink("link", link);
  CHECK_EQ(outcome(link + "/deep/file"), "no: ");
}

// Nobody ever writes into the pipe, and the disk holds nothing of the huge file.
TEST(no_pipe_is_waited_for_and_no_huge_file_is_read) {
  const Folder folder;
  CHECK_EQ(mkfifo(folder.path("pipe").c_str(), 0600), 0);
  CHECK_EQ(outcome(folder.path("pipe")), "no: is not a regular file");
  CHECK_EQ(outcome(folder.path("")), "no: is not a regular file");
  write(folder.path("huge"), "");
  CHECK_EQ(chmod(folder.path("huge").c_str(), 0600), 0);
  CHECK_EQ(truncate(folder.path("huge").c_str(), off_t{1} << 40), 0);
  CHECK_EQ(outcome(folder.path("huge")), "no: is larger than 64 MB");
}

TEST(the_overflow_user_of_a_namespace_is_nobodys_own) {
  CHECK(is_own_user(geteuid()));
  CHECK(!is_own_user(geteuid() + 1));
  run_in_fork([] {
    const uid_t outside = geteuid();
    if (unshare(CLONE_NEWUSER) != 0) return;  // where containers forbid it
    write("/proc/self/uid_map", std::to_string(kStranger) + " " + std::to_string(outside) + " 1\n");
    CHECK_EQ(geteuid(), kStranger);
    CHECK(!is_own_user(kStranger));
  });
}

}  // namespace farandole::check
