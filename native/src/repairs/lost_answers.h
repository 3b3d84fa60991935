#pragma once

namespace kv::nixl {

// Drops UCX's answers to dead readers. Over TCP, the process that is read answers each message of a
// READ with data. When the reader has died, UCX 1.19 to 1.23 aborts this process if it cannot send
// an answer, and uses freed memory for waiting ones.
// Call it between loading NIXL's UCX plugin and creating a backend: UCX copies the tables that this
// changes. The repair `ucx_lost_answers` says whether it took hold. Nothing changes if UCX has
// another version, is not as expected, or is loaded twice.
void drop_lost_answers();

}  // namespace kv::nixl
