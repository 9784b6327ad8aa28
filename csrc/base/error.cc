// SPDX-License-Identifier: Apache-2.0
#include "base/error.h"

#include <cerrno>
#include <system_error>

namespace farandole {

void throw_system_error(const std::string& what, int error_number, const std::string& remedy) {
  std::string text = what + ": " + std::generic_category().message(error_number);
  if (!remedy.empty()) {
    text += "; " + remedy;
  } else if (error_number == EMFILE) {
    text += "; raise the limit of open files (ulimit -n)";
  }
  throw Error(ErrorCode::kLibrary, text);
}

}  // namespace farandole
