import { transportSuite } from "@kv/conformance/transport";
import { nixlTransport } from "@kv/nixl";
import { describe } from "vitest";
import { FAKE_NIXL, fakeMissing } from "../support/fake-nixl.js";

describe.skipIf(fakeMissing)(`the fake of NIXL (${fakeMissing ?? "found"})`, () => {
  transportSuite({ name: "nixl (fake)", create: async () => nixlTransport({ library: FAKE_NIXL }) });
});
