import { KvError } from "@kv/interface";
import { expect, test } from "vitest";
import { explainRefusedPeer } from "./backend-errors.js";

const refused = new KvError(
  "KV_AGENT_METADATA_INVALID",
  'NIXL refused the metadata of "p0": NIXL status -3',
  {
    hint: "give both agents a backend in common",
  },
);
const efa = [{ name: "rdmap0", driver: "efa" }];
const explain = (
  backends: readonly string[],
  environment: Record<string, string> = {},
  devices = efa,
  error: unknown = refused,
) =>
  explainRefusedPeer(error, {
    backends: backends.map((name) => ({ name })),
    environment,
    devices,
  }) as KvError;

test("a peer that UCX cannot reach from a host with EFA alone: the error names EFA, and LIBFABRIC as the remedy", () => {
  const { code, message, hint } = explain(["UCX"]);
  expect(code).toBe("KV_AGENT_METADATA_INVALID");
  expect(message).toBe(
    `${refused.message}; EFA (rdmap0) is the only fabric of this host, and UCX has no transport for it`,
  );
  expect(hint).toMatch(
    /^set NIXL_BACKEND=LIBFABRIC, or backends.* on both sides; give both agents/,
  );
});

test("on other hosts the error names the variables that restrict the route, with their values", () => {
  const { message, hint } = explain(
    ["UCX"],
    { UCX_TLS: "rc,ud,sm,^cuda_ipc", UCX_NET_DEVICES: "mlx5_0:1" },
    [],
  );
  expect(message).toContain(
    "here UCX_NET_DEVICES=mlx5_0:1, UCX_TLS=rc,ud,sm,^cuda_ipc may leave no route to it",
  );
  expect(hint).toContain("or unset UCX_NET_DEVICES and UCX_TLS");
});

test("LIBFABRIC, hosts without such variables, and other errors are left as they are", () => {
  expect(explain(["LIBFABRIC"])).toBe(refused);
  expect(explain(["UCX"], {}, [])).toBe(refused);
  const other = new KvError(
    "KV_AGENT_METADATA_INVALID",
    "the metadata is of an agent with this agent's own name",
  );
  expect(explain(["UCX"], {}, efa, other)).toBe(other);
});
