//! Whoever was away and comes back may hold another version of a step than those who stayed.

use super::Registry;
use crate::agent::mutant;
use crate::torchft::QuorumMember;

impl Registry {
    /// Lists a member that was not in the last quorum, and claims the very step of those who were, one step lower: so it
    /// heals.
    ///
    /// An average may reach one member and not the others. Cut off at that moment, it commits step S + 1 alone, the
    /// others drop it, and commit their own S + 1 without its gradients. While it is a step ahead, TorchFT lets the others
    /// heal from it; once both are at S + 1, nothing would tell the two versions apart.
    pub(super) fn distrust_returning(&self, participants: &mut [QuorumMember]) {
        let stayed =
            |id: &str| self.state.previous.iter().any(|member| member.id == id && member.gone.is_none());
        let newest = participants.iter().filter(|one| stayed(&one.replica_id)).map(|one| one.step).max();
        let Some(newest) = newest.filter(|step| *step > 0 && !mutant::is_on("trust_returning")) else {
            return;
        };
        for one in participants.iter_mut().filter(|one| one.step == newest && !stayed(&one.replica_id)) {
            tracing::info!(id = one.replica_id, step = newest, "it was away, and heals");
            one.step -= 1;
        }
    }
}
