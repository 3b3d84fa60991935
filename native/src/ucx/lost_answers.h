#pragma once

namespace kv::nixl {

// Over TCP, UCX makes a READ of messages: the process that is read answers each with data. When the
// reader has died, UCX 1.19 to 1.23 aborts this process for an answer that it cannot send, or uses
// memory that it has freed for those that wait. From now on such answers are dropped: their reader
// is gone. Call it when NIXL's UCX plugin is loaded, before a backend of it is created: UCX copies
// the tables that this changes. Where UCX is not as expected, such as a version that is not known,
// or where there are two, nothing is changed.
void drop_lost_answers();

// Whether nothing was changed, once.
bool take_unknown_ucx();

}  // namespace kv::nixl
