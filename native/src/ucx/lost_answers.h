#pragma once

namespace kv::nixl {

// Over TCP, UCX makes a READ of messages: the process that is read answers each with data. When the reader has died, UCX 1.19 to 1.23 aborts this process
// for an answer that it cannot send, or uses memory that it has freed for those that wait. From now on such answers are dropped: nobody waits for them.
// Call it when NIXL's UCX plugin is loaded, before a backend of it is created: UCX copies the tables that this changes. Returns whether UCX is as expected;
// where it is not, nothing is changed.
bool drop_lost_answers();

}  // namespace kv::nixl
