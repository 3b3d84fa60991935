import type { PickerSettingsInput } from "@kv/epp";
import type { ProxySettingsInput } from "@kv/proxy";
import { startEnvoy } from "../envoy/envoy-process.js";
import type { CloseStack } from "../instance/close-stack.js";
import { SupervisedServer } from "../processes/supervisor.js";
import { type ClusterOptions, planPicker, planProxy, planSidecar } from "./cluster-plan.js";
import type { ClusterMember, StartOptions } from "./members.js";

/** How the servers of a front are started: in this process, or each in its own. */
export interface FrontServers {
  /** Port 0 takes a free one. */
  proxy(name: string, settings: ProxySettingsInput, port: number): Promise<ClusterMember>;
  picker(name: string, settings: PickerSettingsInput): Promise<ClusterMember>;
}

/** Starts what clients send requests to, and returns it: a proxy; or Envoy, in front of a picker and a sidecar beside each decode instance. */
export async function startFront(
  options: ClusterOptions,
  { prefills, decodes }: { readonly prefills: ClusterMember[]; readonly decodes: ClusterMember[] },
  { log, restart = false, proxyPort = 0 }: StartOptions,
  closers: CloseStack,
  servers: FrontServers,
): Promise<ClusterMember> {
  if (options.front !== "envoy")
    return servers.proxy("proxy", planProxy(prefills, decodes, options), proxyPort);
  const sidecars: ClusterMember[] = [];
  for (const [i, decode] of decodes.entries())
    sidecars.push(await servers.proxy(`sidecar-${i}`, planSidecar(prefills, decode, options), 0));
  const picker = await servers.picker("picker", planPicker(prefills, decodes, sidecars));
  const envoy = await SupervisedServer.start({
    start: (before) =>
      startEnvoy({
        port: before?.port ?? proxyPort,
        pickerPort: Number(new URL(picker.url).port),
        endpoints: sidecars.map(({ url }) => new URL(url).host),
        failOpen: false,
      }),
    restart: () => restart && !closers.isClosing,
    log,
  });
  closers.add(envoy.name, () => envoy.stop());
  const { name, url, backend } = envoy;
  return { name, url, backend, process: envoy };
}
