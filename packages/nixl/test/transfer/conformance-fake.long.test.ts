// A long suite: the suite of transports on the stand-in; conformance.test.ts has it over UCX.
import { transportSuite } from "@kv/conformance/transport";
import { nixlTransport } from "@kv/nixl";
import { FAKE_NIXL, fakeMissing } from "@kv/testing/nixl/fake-nixl";
import { describe } from "vitest";

describe.skipIf(fakeMissing)(`the fake of NIXL (${fakeMissing ?? "found"})`, () => {
  transportSuite({
    name: "nixl (fake)",
    create: async () => nixlTransport({ library: FAKE_NIXL }),
  });
});
