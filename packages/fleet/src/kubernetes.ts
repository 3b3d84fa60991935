export type { KubernetesAccess } from "./kubernetes/api-connection.js";
export {
  type KubernetesDiscoveryOptions,
  kubernetesDiscovery,
} from "./kubernetes/kubernetes-discovery.js";
export type { PortName } from "./kubernetes/read-pod.js";
