import { describeIsolation } from "@kv/testing/isolation/isolation-suite";
import { pushConnector } from "../src/index.js";

const VIOLATION = /has wrong bytes|user \d+ ended with/;

describeIsolation(
  { connector: pushConnector },
  { atOnce: true },
  {
    scenes: 150,
    checks: [
      ["capability", VIOLATION],
      ["secret", VIOLATION],
      ["prompt", VIOLATION],
    ],
  },
);
