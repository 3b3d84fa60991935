import type { ConnectorModule } from "@kv/interface";

/** The engine and the request of each load. */
export declare const state: { readonly loaded: readonly string[] };
declare const shelfConnector: ConnectorModule;
export default shelfConnector;
