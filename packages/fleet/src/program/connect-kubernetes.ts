import type { Discovery } from "../discovery/discovery.js";
import type { FleetSettings } from "../settings/fleet-settings.js";

/**
 * The discovery of the setting `discovery.kubernetes`, for `createDiscovery`. Loads its package
 * lazily.
 *
 * @throws those of `kubernetesDiscovery`.
 */
export async function connectKubernetes(
  settings: FleetSettings["discovery"],
): Promise<(() => Discovery) | undefined> {
  const { kubernetes } = settings ?? {};
  if (kubernetes === undefined) return undefined;
  const { kubernetesDiscovery } = await import("../kubernetes/kubernetes-discovery.js");
  const discovery = await kubernetesDiscovery(kubernetes);
  return () => discovery;
}
