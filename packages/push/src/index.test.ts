import { connectorRegistry } from "@kv/connector";
import { expect, it } from "vitest";
import { PUSH_CONNECTOR_NAMES, pushConnector, registerPushConnector } from "./index.js";

it("the connector is found by each of its names, and by its module path", async () => {
  const registry = connectorRegistry({ importModule: () => import("./index.js") });
  registerPushConnector((name, loader) => registry.register(name, loader));
  for (const connector of PUSH_CONNECTOR_NAMES) {
    expect(await registry.resolve({ connector })).toBe(pushConnector);
  }
  const byPath = { connector: "NixlPushConnector", modulePath: "@kv/push" };
  expect(await registry.resolve(byPath)).toBe(pushConnector);
});
