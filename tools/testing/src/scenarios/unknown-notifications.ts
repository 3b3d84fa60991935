import type { ConnectorModule } from "@kv/interface";
import { encodeNotification } from "@kv/protocol";
import { expect, it } from "vitest";
import { createScenario, prompt } from "./scenario.js";

const bytes = (text: string) => new TextEncoder().encode(text);
/** A newer version of vLLM or of `@kv` might send them. */
const UNKNOWN = [
  bytes("PUSH_FAILED:cmpl-1"),
  bytes("HB2:a,b"),
  bytes("no colon"),
  Uint8Array.of(0xff, 0xfe, 0x00),
  encodeNotification({
    kind: "extension",
    message: { type: "from-the-future", request_ids: ["r2"] },
  }),
];

export function itIgnoresUnknownNotifications(connector: ConnectorModule): void {
  it("vllm#50754: a notification of an unknown form is ignored and counted, at P and at D", async () => {
    const play = createScenario({ connector });
    const { p, d } = await play.pair();
    const atP = await play.prefilled(p, 1);
    const { host, port } = d.address;
    const peers = [
      await play.stranger("x", atP),
      await play.stranger("y", { ...atP, remote_host: host, remote_port: port }),
    ];
    for (const peer of peers)
      for (const payload of UNKNOWN) await play.clock.settle(peer.notify(payload));
    await play.ends(d.decode({ ...prompt(1), params: atP }));
    await play.serves(p, d, 2);
    for (const host of ["p", "d"])
      expect(play.counted(host, "ignoredNotifications")).toBe(UNKNOWN.length);
    for (const peer of peers) await peer.close();
  });
}
