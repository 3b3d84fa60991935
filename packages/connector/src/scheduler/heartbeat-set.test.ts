import { describe, expect, it } from "vitest";
import type { RemoteRequest } from "../requests/references.js";
import { HeartbeatSet } from "./decode-requests.js";

const remote = (requestId: string, given: Partial<RemoteRequest> = {}): RemoteRequest => ({
  engineId: "p",
  host: "prefill",
  port: 5600,
  tpSize: 1,
  dcpSize: 1,
  ppSize: 1,
  requestId,
  ...given,
});
const lease = (capability: string) => ({ lease: { incarnation: "i", generation: 1, capability } });

describe("heartbeat set", () => {
  it("tells the workers what came and what went, once", () => {
    const set = new HeartbeatSet();
    set.add(remote("a"));
    set.add(remote("b", lease("secret")));
    expect(set.take()).toMatchObject([
      {
        engineId: "p",
        begin: [{ requestId: "a" }, { requestId: "b", capability: "secret" }],
        end: [],
      },
    ]);
    expect([set.hasChanged, set.take()]).toEqual([false, []]);
    set.remove(remote("a"));
    expect(set.take()).toMatchObject([{ begin: [], end: [{ requestId: "a" }] }]);
    expect(set.size).toBe(1);
  });

  it("tells nothing of a request that came and went between two steps, in either order", () => {
    const set = new HeartbeatSet();
    set.add(remote("a"));
    set.remove(remote("a"));
    expect([set.hasChanged, set.take()]).toEqual([false, []]);
    set.add(remote("b"));
    set.take();
    set.remove(remote("b"));
    set.add(remote("b"));
    expect([set.hasChanged, set.take(), set.size]).toEqual([false, [], 1]);
  });

  it("keeps a request that two of D's requests name until both are gone", () => {
    const set = new HeartbeatSet();
    set.add(remote("a"));
    set.add(remote("a"));
    expect(set.take()).toMatchObject([{ begin: [{ requestId: "a" }] }]);
    set.remove(remote("a"));
    expect([set.take(), set.size]).toEqual([[], 1]);
    set.remove(remote("a"));
    expect(set.take()).toMatchObject([{ end: [{ requestId: "a" }] }]);
  });

  it("tells one id with two capabilities apart", () => {
    const set = new HeartbeatSet();
    set.add(remote("a", lease("right")));
    set.add(remote("a", lease("wrong")));
    set.take();
    set.remove(remote("a", lease("wrong")));
    expect(set.take()).toMatchObject([
      { begin: [], end: [{ requestId: "a", capability: "wrong" }] },
    ]);
  });

  it("ignores a removal of a request that it does not have, as after clear", () => {
    const set = new HeartbeatSet();
    set.add(remote("a"));
    set.clear();
    set.remove(remote("a"));
    expect([set.size, set.take()]).toEqual([0, []]);
  });
});
