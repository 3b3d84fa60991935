import type { ConnectorModule } from "@kv/interface";
import type { FaultRule } from "@kv/transport-memory";
import { expect, it } from "vitest";
import { createScenario } from "./scenario.js";

/** Heartbeats in vLLM's form. `isLost` gets the number of each, from 1. */
export function heartbeats(isLost: (n: number) => boolean = () => false): {
  rule: FaultRule;
  sent(): number;
} {
  let sent = 0;
  const matches = ({ payload }: { payload?: Uint8Array }) => {
    if (!new TextDecoder().decode(payload).startsWith("HB:")) return false;
    sent += 1;
    return isLost(sent);
  };
  return {
    rule: { fault: "fail", operation: "NOTIFY", from: "d", where: matches },
    sent: () => sent,
  };
}

export function itKeepsLeasesOfSixSeconds(connector: ConnectorModule): void {
  it("kv_lease_duration of P is the lease, and a heartbeat extends it by two thirds from its arrival", async () => {
    const play = createScenario({ connector });
    const p = await play.engine("p", { extra: { kv_lease_duration: 6 } });
    const params = await play.prefilled(p, 1);
    await play.prefilled(p, 2);
    const d = await play.stranger("d", params);
    await play.clock.advance(5000);
    const heartbeat = `HB:${String(params.remote_request_id)}`;
    await play.clock.settle(d.notify(new TextEncoder().encode(heartbeat)));
    for (const [afterMs, kept] of [
      [900, 2],
      [200, 1],
      [2700, 1],
      [400, 0],
    ] as const) {
      await play.clock.advance(afterMs);
      expect(p.outstanding().kept).toBe(kept);
    }
    await d.close();
  });
}
