// What a block on sm_90 has beside memory and threads.
#pragma once

namespace emulator {

void reset_sm90();

}  // namespace emulator
