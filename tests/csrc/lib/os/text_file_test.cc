// SPDX-License-Identifier: Apache-2.0
// Files in folders where another user has put links, pipes and files at the names that we write.
#include "lib/os/text_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <string>

#include "base/clock.h"
#include "folder.h"

namespace farandole::check {
namespace {

namespace fs = std::filesystem;

constexpr uid_t kStranger = 65534;

constexpr mode_t kLikeTmp = 01777;
// Where another user may add names: /tmp, the same without the sticky bit, for which Linux protects no links, and a
// folder that belongs to that user.
struct Shared {
  mode_t mode;
  uid_t owner;
};
constexpr Shared kShared[] = {
    {kLikeTmp, 0}, {0777, 0}, {0775, 0}, {0755, kStranger}, {kLikeTmp, kStranger}};

// A folder for all, and a file elsewhere that nobody should write.
class Place {
 public:
  explicit Place(Shared for_all = {kLikeTmp, geteuid()}) {
    fs::create_directory(path("own"));
    fs::create_directory(path("for all"));
    if (for_all.owner != geteuid() && geteuid() != 0) skip("needs root, to be two users");
    CHECK_EQ(chown(path("for all").c_str(), for_all.owner, for_all.owner), 0);
    CHECK_EQ(chmod(path("for all").c_str(), for_all.mode), 0);
    write_text_file(victim(), "precious");
  }

  std::string path(const std::string& name) const { return folder_.path(name); }
  std::string victim() const { return path("own/victim"); }
  // A link in the folder for all, made by somebody else.
  std::string plant(const std::string& name, const std::string& target) const {
    if (geteuid() != 0) skip("needs root, to be two users");
    const std::string link = path("for all/" + name);
    fs::create_symlink(target, link);
    CHECK_EQ(lchown(link.c_str(), kStranger, kStranger), 0);
    return link;
  }
  void check_unharmed() const { CHECK_EQ(read_text_file(victim()), "precious"); }

 private:
  const Folder folder_;
};

}  // namespace

TEST(a_file_that_was_made_later_stays) {
  const Place place;
  const std::string path = place.path("own/a");
  const int64_t now = epoch_ns();
  write_text_file(path, "new", now);
  write_text_file(path, "old", now - 1);
  CHECK_EQ(read_text_file(path), "new");
  CHECK_EQ(std::distance(fs::directory_iterator(place.path("own")), {}), 2);  // and the victim
  write_text_file(path, "same", now);
  CHECK_EQ(read_text_file(path), "same");
  write_text_file(path, "future", epoch_ns() + 3600'000'000'000);  // then the clock is set back
  write_text_file(path, "newer", epoch_ns());
  CHECK_EQ(read_text_file(path), "newer");
}

TEST(a_file_that_cannot_be_made_leaves_nothing) {
  const Place place;
  make_folder(place.path("own/taken"));
  CHECK_THROWS(write_text_file(place.path("own/taken"), "new"), ErrorCode::kLibrary);
  CHECK_EQ(std::distance(fs::directory_iterator(place.path("own")), {}), 2);  // and the victim
}

TEST(a_file_is_made_and_replaced) {
  const Place place;
  for (const char* name : {"own/a", "for all/a"}) {
    for (const char* text : {"first", "second"}) {
      write_text_file(place.path(name), text);
      CHECK_EQ(read_text_file(place.path(name)), text);
      const Fd fd = create_file(place.path(name));
      CHECK(fd && write_whole(fd.get(), "new"));
      CHECK_EQ(read_text_file(place.path(name)), "new");
      CHECK_EQ(fs::status(place.path(name)).permissions(),
               fs::perms::owner_read | fs::perms::owner_write);
    }
  }
  make_folder(place.path("own/x//y/z/"));
  CHECK(fs::is_directory(place.path("own/x/y/z")));
  make_folder(place.path("own/x/y/z"));
  CHECK_THROWS(make_folder(place.victim()), ErrorCode::kLibrary);
  CHECK_THROWS(write_text_file(place.path("nowhere/a"), ""), ErrorCode::kLibrary);
  CHECK(!create_file(place.path("nowhere/a")));
}

TEST(names_relative_to_the_working_folder) {
  const Place place;
  run_in_fork([&] {
    fs::current_path(place.path("own"));
    make_folder("inner");
    write_text_file("inner/a", "a");
    write_text_file("b", "b");
    CHECK_EQ(read_text_file(place.path("own/inner/a")) + read_text_file(place.path("own/b")), "ab");
  });
}

// The name that earlier versions wrote before they renamed it.
TEST(a_link_at_the_temporary_name_is_not_followed) {
  const Place place;
  const std::string file = "dump.json";
  place.plant(file + "." + std::to_string(getpid()) + ".tmp", place.victim());
  write_text_file(place.path("for all/" + file), "text");
  CHECK_EQ(read_text_file(place.path("for all/" + file)), "text");
  place.check_unharmed();
}

TEST(a_link_at_the_name_is_replaced_or_refused) {
  for (const Shared& shared : kShared) {
    const Place place(shared);
    const std::string link = place.plant("timeline.json", place.victim());
    CHECK(!create_file(link));
    CHECK_EQ(errno, EACCES);
    place.check_unharmed();
    write_text_file(link, "text");
    CHECK(!fs::is_symlink(link));
    place.check_unharmed();
  }
}

TEST(another_name_of_a_file_elsewhere_is_not_written_into) {
  const Place place;
  fs::create_hard_link(place.victim(), place.path("for all/timeline.json"));
  const Fd fd = create_file(place.path("for all/timeline.json"));
  CHECK(fd && write_whole(fd.get(), "text"));
  place.check_unharmed();
}

TEST(a_folder_that_is_anothers_link_is_refused) {
  for (const Shared& shared : kShared) {
    const Place place(shared);
    const std::string link = place.plant("dumps", place.path("own"));
    CHECK_THROWS(make_folder(link), ErrorCode::kLibrary);
    CHECK_THROWS(make_folder(link + "/inner"), ErrorCode::kLibrary);
    CHECK_THROWS(write_text_file(link + "/victim", "text"), ErrorCode::kLibrary);
    CHECK(!create_file(link + "/victim"));
    place.check_unharmed();
  }
}

// Who may write to a folder without the sticky bit can move a link of the user's own to the name that we write.
TEST(a_link_of_ones_own_that_others_can_have_moved_is_refused) {
  for (const mode_t mode : {0777, 0775}) {
    const Place place({mode, geteuid()});
    fs::create_symlink(place.victim(), place.path("for all/data"));
    fs::rename(place.path("for all/data"), place.path("for all/run.json"));
    CHECK(!create_file(place.path("for all/run.json")));
    CHECK_EQ(errno, EACCES);
    place.check_unharmed();
    write_text_file(place.path("for all/run.json"), "text");
    place.check_unharmed();
  }
}

TEST(links_and_pipes_of_ones_own_are_what_they_lead_to) {
  const Place place;
  fs::create_symlink("own", place.path("short"));
  fs::create_symlink(place.path("own"), place.path("for all/mine"));
  for (const char* folder : {"short", "for all/mine"}) {
    make_folder(place.path(folder));
    write_text_file(place.path(folder) + std::string("/a"), folder);
    CHECK_EQ(read_text_file(place.path("own/a")), folder);
  }
  fs::create_symlink("own/target", place.path("short file"));
  const Fd fd = create_file(place.path("short file"));
  CHECK(fd && write_whole(fd.get(), "text"));
  CHECK_EQ(read_text_file(place.path("own/target")), "text");
  const std::string pipe = place.path("for all/pipe");
  CHECK_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const Fd reader(open(pipe.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  const Fd writer = create_file(pipe);
  CHECK(writer && write_whole(writer.get(), "text"));
  char got[8];
  CHECK_EQ(read(reader.get(), got, sizeof got), 4);
}

}  // namespace farandole::check
