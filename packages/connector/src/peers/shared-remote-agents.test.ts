import type { Agent } from "@kv/interface";
import { expect, test } from "vitest";
import { SharedRemoteAgents } from "./remote-engine.js";

/**
 * A transport's agent that binds a name to the metadata that came last. The name is the first
 * letter.
 */
function bindingAgent() {
  const bound = new Map<string, string>();
  const agent = {
    async addRemote(metadata: Uint8Array) {
      const text = new TextDecoder().decode(metadata);
      bound.set(text.charAt(0), text);
      return text.charAt(0);
    },
    async removeRemote(name: string) {
      bound.delete(name);
    },
  } as Partial<Agent> as Agent;
  return { bound, agents: new SharedRemoteAgents(agent) };
}
const bytes = (text: string) => new TextEncoder().encode(text);

test("an engine that names another engine's agent is refused, and the agent stays where it was", async () => {
  const { bound, agents } = bindingAgent();
  const [added, refused] = await Promise.allSettled([
    agents.add(bytes("a of p"), "p:1"),
    agents.add(bytes("a of a rogue"), "rogue:1"),
  ]);
  expect(added).toMatchObject({ value: "a" });
  expect(refused).toMatchObject({ reason: { code: "KV_AGENT_METADATA_INVALID" } });
  expect(bound.get("a")).toBe("a of p");
  expect(await agents.add(bytes("a of p"), "p.example:1")).toBe("a");
  expect(await agents.add(bytes("a of p, registered again"), "p:1")).toBe("a");
  for (let users = 3; users > 0; users--) {
    expect(agents.size).toBe(1);
    await agents.remove("a");
  }
  expect(agents.size).toBe(0);
  expect(await agents.add(bytes("a of another"), "rogue:1")).toBe("a");
});
