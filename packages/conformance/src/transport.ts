import { describe } from "vitest";
import { endingTests } from "./transport/endings.js";
import { ground, type TransportSuiteOptions } from "./transport/ground.js";
import { listTests } from "./transport/lists.js";
import { memoryTests } from "./transport/memories.js";
import { movingTests } from "./transport/moving.js";
import { notificationTests } from "./transport/notices.js";
import { peerTests } from "./transport/peers.js";
import { runTests } from "./transport/runs.js";
import { transferRefusalTests } from "./transport/transfer-refusals.js";

export type { TransportSuiteOptions } from "./transport/ground.js";

/**
 * What the doc comments of `Transport` promise, as tests. An implementation runs it in a test file of its own:
 *
 *     import { transportSuite } from "@kv/conformance/transport";
 *     transportSuite({ name: "mine", create: async () => myTransport() });
 *
 * All agents live in this process and exchange metadata directly. Nothing is measured, and no test waits for time to
 * pass: each promise is awaited, and "no notification" is shown by a later one that comes first.
 */
export function transportSuite(options: TransportSuiteOptions): void {
  describe(`transport ${options.name}`, () => {
    const stand = ground(options);
    describe("memory", () => memoryTests(stand));
    describe("peers", () => peerTests(stand));
    describe("prepared lists", () => listTests(stand));
    describe("transfers", () => {
      movingTests(stand);
      runTests(stand);
      transferRefusalTests(stand);
    });
    describe("notifications", () => notificationTests(stand));
    describe("endings", () => endingTests(stand));
  });
}
