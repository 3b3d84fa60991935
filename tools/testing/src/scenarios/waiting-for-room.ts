import type { SimEngine } from "../simulator/sim-engine.js";
import { type createScenario, prompt } from "./scenario.js";

export const ROOM_FOR_ONE = { numBlocks: 3, extra: { request_timeout: 100 } };

/**
 * The first request's KV never arrives, so the second one waits for longer than a lease, which
 * heartbeats extend.
 */
export async function expectKeptWaiting(
  play: ReturnType<typeof createScenario>,
  p: SimEngine,
  d: SimEngine,
  whileWaiting: () => void,
): Promise<void> {
  play.network.setFaults([{ fault: "drop", operation: "READ", times: 1 }]);
  const [first, second] = await play.clock.settle(
    Promise.all([p.prefill(prompt(1)), p.prefill(prompt(2))]),
  );
  const one = d.decode({ ...prompt(1), requestId: "d1", params: first });
  one.catch(() => {});
  await play.clock.advance(10);
  const two = d.decode({ ...prompt(2), requestId: "d2", params: second });
  await play.clock.advance(90_000);
  whileWaiting();
  await play.ends(one, "KV_REQUEST_TIMEOUT");
  await play.ends(two);
}
