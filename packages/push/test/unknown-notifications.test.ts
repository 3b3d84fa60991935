import { createScenario } from "@kv/testing/scenarios/scenario";
import { itIgnoresUnknownNotifications } from "@kv/testing/scenarios/unknown-notifications";
import { describe, expect, it } from "vitest";
import { pushConnector } from "../src/index.js";

itIgnoresUnknownNotifications(pushConnector);

describe("vllm#50754: a failure of P in vLLM's form", () => {
  const newer = { connectorVersion: 16 };

  it.each([1, 2])(
    "P of connector version 16 tells a plain D, which fails at once; TP %i",
    async (tpSize) => {
      await using play = createScenario({
        connector: pushConnector,
        faults: [{ fault: "fail", operation: "WRITE", nth: tpSize }],
      });
      const { p, d } = await play.pair(
        { ...newer, tpSize, plain: true },
        { ...newer, plain: true },
      );
      expect(await play.within(5000, play.handedOver(p, d))).toBe("KV_TRANSFER_FAILED");
      await play.clock.advance(100_000);
      expect(d.outstanding().blocks).toBe(0);
    },
  );

  it("P of connector version 15 says nothing, as 0.33's D knows no such message", async () => {
    await using play = createScenario({
      connector: pushConnector,
      faults: [{ fault: "fail", operation: "WRITE", nth: 1 }],
    });
    const { p, d } = await play.pair(
      { plain: true },
      { plain: true, extra: { push_registration_timeout: 10 } },
    );
    expect(await play.handedOver(p, d)).toBe("KV_REQUEST_TIMEOUT");
    await play.clock.advance(1_000_000);
  });
});
