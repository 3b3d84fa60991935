import { KvError } from "@kv/interface";
import { expect, test } from "vitest";
import { explainRefusedPeer } from "./backend-errors.js";

const code = "KV_AGENT_METADATA_INVALID";
const refused = new KvError(code, 'NIXL refused the metadata of "p0": NIXL status -3', {
  hint: "give both agents a backend in common",
});
const EFA = [{ name: "rdmap0", efa: true }];
const explain = (name: string, environment = {}, devices = EFA, error = refused) =>
  explainRefusedPeer(error, { backends: [{ name }], environment, devices });

test("a peer that UCX cannot reach from a host with EFA alone: the error names EFA, and LIBFABRIC as the remedy", () => {
  expect(explain("UCX")).toMatchObject({
    code,
    message: `${refused.message}; EFA (rdmap0) is the only fabric of this host, and UCX has no transport for it`,
    hint: expect.stringMatching(
      /^set NIXL_BACKEND=LIBFABRIC, or backends.* on both sides; give both agents/,
    ),
  });
});

test("on other hosts the error names the variables that restrict the route, with their values", () => {
  const variables = { UCX_TLS: "rc,ud,sm,^cuda_ipc", UCX_NET_DEVICES: "mlx5_0:1" };
  expect(explain("UCX", variables, [])).toMatchObject({
    message: expect.stringContaining(
      "here UCX_NET_DEVICES=mlx5_0:1, UCX_TLS=rc,ud,sm,^cuda_ipc may leave no route to it",
    ),
    hint: expect.stringContaining("or unset UCX_NET_DEVICES and UCX_TLS"),
  });
});

test("LIBFABRIC, hosts without such variables, and other errors are left as they are", () => {
  expect(explain("LIBFABRIC")).toBe(refused);
  expect(explain("UCX", {}, [])).toBe(refused);
  const other = new KvError(code, "the metadata is of an agent with this agent's own name");
  expect(explain("UCX", {}, EFA, other)).toBe(other);
});
