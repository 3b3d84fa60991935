import { expect, test, vi } from "vitest";
import { kubernetesDiscovery } from "./kubernetes-discovery.js";

vi.mock("@kubernetes/client-node", () => {
  throw new Error("Cannot find package '@kubernetes/client-node'");
});

test("without the optional package, the error says what to install", async () => {
  await expect(kubernetesDiscovery({ podSelector: "app=vllm" })).rejects.toMatchObject({
    code: "KV_CONFIG_INVALID",
    message: expect.stringContaining("needs the package @kubernetes/client-node"),
    hint: expect.stringContaining("npm install @kubernetes/client-node@1"),
  });
});
