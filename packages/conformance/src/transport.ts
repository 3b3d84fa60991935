import { describe } from "vitest";
import { abortAndCloseTests } from "./transport/abort-and-close.js";
import { descriptorRunTests } from "./transport/descriptor-runs.js";
import { createFixture, type TransportSuiteOptions } from "./transport/fixture.js";
import { invalidTransferTests } from "./transport/invalid-transfers.js";
import { memoryTests } from "./transport/memory.js";
import { notificationTests } from "./transport/notifications.js";
import { peerTests } from "./transport/peers.js";
import { preparedListTests } from "./transport/prepared-lists.js";
import { transferTests } from "./transport/transfers.js";

export type { TransportSuiteOptions } from "./transport/fixture.js";

/**
 * Tests a transport against the contract of `Transport`. An implementation calls it in a test file
 * of its own:
 *
 *     import { transportSuite } from "@kv/conformance/transport";
 *     transportSuite({ name: "mine", create: async () => myTransport() });
 *
 * All agents live in this process and exchange metadata directly. No test measures time or sleeps:
 * each promise is awaited, and the absence of a notification is shown by a later one that arrives
 * first.
 */
export function transportSuite(options: TransportSuiteOptions): void {
  describe(`transport ${options.name}`, () => {
    const fixture = createFixture(options);
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
