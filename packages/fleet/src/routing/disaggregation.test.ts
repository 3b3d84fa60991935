import { expect, test } from "vitest";
import { decideDisaggregation } from "./disaggregation.js";

const known = {
  promptTokens: 1000,
  decodeCachedTokens: 0,
  prefillCachedTokens: 0,
  readbackTokens: 0,
  prefillComputeMs: undefined,
  prefillWaitMs: undefined,
  decodeComputeMs: undefined,
  decodeInFlight: 0,
  decodePromptShare: 0,
};

const busy = { prefillWaitMs: 500, decodeComputeMs: 50 };

test.each([
  [{}, 100, true, "long-suffix"],
  [{}, 999, true, "long-suffix"],
  [{}, 1000, false, "short-suffix"],
  [{ decodeCachedTokens: 900 }, 100, false, "short-suffix"],
  [{ decodeCachedTokens: 899 }, 100, true, "long-suffix"],
  [{ decodeCachedTokens: 950 }, 10, false, "prefix-cached"],
  [{ decodeCachedTokens: 5000 }, 0, false, "prefix-cached"],
  [{ promptTokens: undefined }, 100, true, "unknown-length"],
  [{ promptTokens: 0 }, 0, false, "short-suffix"],
  [{ prefillWaitMs: 51, decodeComputeMs: 50 }, 100, false, "prefill-busy"],
  [{ prefillWaitMs: 50, decodeComputeMs: 50 }, 100, true, "long-suffix"],
  [{ prefillWaitMs: 50 }, 100, true, "long-suffix"],
  [{ prefillWaitMs: 150, decodeComputeMs: 50, decodeInFlight: 2 }, 100, true, "long-suffix"],
  [{ prefillWaitMs: 151, decodeComputeMs: 50, decodeInFlight: 2 }, 100, false, "prefill-busy"],
  [{ decodeInFlight: 1, decodePromptShare: 0.2 }, 1000, false, "short-suffix"],
  [{ decodeInFlight: 1, decodePromptShare: 0.201 }, 1000, true, "decode-busy"],
  [{ decodeInFlight: 1, decodePromptShare: 0.201 }, 999, true, "long-suffix"],
  [
    { decodeInFlight: 1, decodePromptShare: 0.5, decodeCachedTokens: 950 },
    1000,
    false,
    "prefix-cached",
  ],
  [{ ...busy, decodeInFlight: 1, decodePromptShare: 0.2 }, 100, false, "prefill-busy"],
  [{ ...busy, decodeInFlight: 1, decodePromptShare: 0.201 }, 100, true, "long-suffix"],
  [{ ...busy, decodeInFlight: 0, decodePromptShare: 0.5 }, 100, false, "prefill-busy"],
  [{ decodeInFlight: 0, decodePromptShare: 0.5 }, 1000, false, "short-suffix"],
  [{ readbackTokens: 900 }, 100, true, "readback"],
  [{ readbackTokens: 900, prefillCachedTokens: 900 }, 100, true, "prefill-cached"],
  [{ prefillCachedTokens: 900, decodeCachedTokens: 899 }, 100, true, "prefill-cached"],
  [{ prefillCachedTokens: 899, decodeCachedTokens: 899 }, 100, true, "long-suffix"],
  [{ readbackTokens: 900, decodeCachedTokens: 950 }, 10, false, "prefix-cached"],
  [{ readbackTokens: 900 }, 1000, false, "short-suffix"],
  [
    { prefillWaitMs: 90, decodeComputeMs: 50, prefillComputeMs: 10, readbackTokens: 800 },
    100,
    true,
    "readback",
  ],
  [
    { prefillWaitMs: 91, decodeComputeMs: 50, prefillComputeMs: 10, readbackTokens: 800 },
    100,
    false,
    "prefill-busy",
  ],
  [{ prefillWaitMs: 51, decodeComputeMs: 50, prefillComputeMs: 60 }, 100, false, "prefill-busy"],
])("%j above %d: two legs %s, %s", (inputs, above, twoLegs, reason) => {
  expect(decideDisaggregation({ ...known, ...inputs }, above)).toEqual({ twoLegs, reason });
});
