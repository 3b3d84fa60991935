import { describe } from "vitest";
import { TIME_LIMIT_MS } from "./time-limits.js";
import { abortAndCloseTests } from "./transport/abort-and-close.js";
import { Fixture, type TransportSuiteOptions } from "./transport/fixture.js";
import { memoryTests } from "./transport/memory.js";
import { notificationTests } from "./transport/notifications.js";
import { peerTests } from "./transport/peers.js";
import { preparedListTests } from "./transport/prepared-lists.js";
import { descriptorRunTests, invalidTransferTests, transferTests } from "./transport/transfers.js";

export type { TransportSuiteOptions } from "./transport/fixture.js";

/**
 * Tests a transport against `Transport`, in a test file of the implementation:
 *
 *     import { transportSuite } from "@kv/conformance/transport";
 *     transportSuite({ name: "mine", create: async () => myTransport() });
 *
 * All agents live in this process. No test measures time or sleeps: a later notification shows that
 * an earlier one did not come.
 */
export function transportSuite(options: TransportSuiteOptions): void {
  describe(`transport ${options.name}`, { timeout: TIME_LIMIT_MS }, () => {
    const fixture = new Fixture(options);
    describe("memory", () => memoryTests(fixture));
    describe("peers", () => peerTests(fixture));
    describe("prepared lists", () => preparedListTests(fixture));
    describe("transfers", () => {
      transferTests(fixture);
      descriptorRunTests(fixture);
      invalidTransferTests(fixture);
    });
    describe("notifications", () => notificationTests(fixture));
    describe("abort and close", () => abortAndCloseTests(fixture));
  });
}
