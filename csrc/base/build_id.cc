// SPDX-License-Identifier: Apache-2.0
#include "base/build_id.h"

namespace farandole {

const char* version() { return FARANDOLE_VERSION; }
const char* build_id() { return FARANDOLE_BUILD_ID; }  // CMakeLists.txt defines this macro

}  // namespace farandole
