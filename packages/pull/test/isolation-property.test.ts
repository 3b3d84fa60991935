import { describeIsolation } from "@kv/testing/isolation/isolation-suite";

const WRONG_BYTES = /request (x|cmpl-own)\d+\S* has wrong bytes/;

describeIsolation(
  {},
  {},
  {
    scenes: 60,
    checks: [
      ["process", WRONG_BYTES],
      ["blocks", WRONG_BYTES],
      ["capability", /user \d+ ended with KV_LEASE_EXPIRED/],
      ["prompt", WRONG_BYTES],
    ],
  },
);
