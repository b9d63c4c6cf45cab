//! What clouds say to a host that they are about to take away, in the forms that they document. Pure: the caller brings
//! the time.

use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use time::OffsetDateTime;
use time::format_description::well_known::{Rfc2822, Rfc3339};

use crate::agent::mutant;

/// What is left where the end has begun, its time cannot be read, or it has passed by this host's clock.
const AT_ONCE: Duration = Duration::from_secs(5);
/// No cloud gives more; what says so is a clock that is wrong.
const LONGEST: Duration = Duration::from_secs(900);
/// Oracle: an `instancepreemptionaction` event comes "two minutes before the instance termination begins".
const OCI_NOTICE: Duration = Duration::from_secs(120);
/// Google: a preempted instance has 30 seconds to shut down.
const GCP_NOTICE: Duration = Duration::from_secs(30);

/// The host is about to be taken away.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Doom {
    /// In the cloud's words.
    pub reason: String,
    /// Until then.
    pub grace: Duration,
}

fn read<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_str(text).map_err(|cause| format!("not of the documented form: {cause}"))
}

fn until(when: &str, now: OffsetDateTime) -> Option<Duration> {
    let when = OffsetDateTime::parse(when, &Rfc3339).or_else(|_| OffsetDateTime::parse(when, &Rfc2822));
    Some(Duration::try_from(when.ok()? - now).unwrap_or_default())
}

fn bounded(left: Option<Duration>) -> Duration {
    left.unwrap_or(AT_ONCE).clamp(AT_ONCE, LONGEST)
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ScheduledEvents {
    events: Vec<ScheduledEvent>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ScheduledEvent {
    event_type: String,
    resources: Vec<String>,
    event_status: String,
    not_before: Option<String>,
    description: Option<String>,
}

/// Azure's scheduled events, `api-version=2020-07-01`: the one that ends the machine `own` the soonest. Scale sets are
/// told of each other's. `Freeze` costs a few seconds and no state.
///
/// <https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events>
pub fn azure(text: &str, own: &str, now: OffsetDateTime) -> Result<Option<Doom>, String> {
    let ScheduledEvents { events } = read(text)?;
    let is_ours = |name: &String| name.eq_ignore_ascii_case(own) || mutant::is_on("heed_all_notices");
    let ends = events.into_iter().filter(|event| {
        matches!(event.event_type.as_str(), "Preempt" | "Terminate" | "Reboot" | "Redeploy")
            && event.resources.iter().any(is_ours)
    });
    let dooms = ends.map(|ScheduledEvent { event_type, event_status, not_before, description, .. }| {
        // Blank once it has started.
        let when = not_before.filter(|_| event_status == "Scheduled");
        let why = description.filter(|words| !words.is_empty()).map(|words| format!(": {words}"));
        let reason = format!("Azure's event {event_type} ({event_status}){}", why.unwrap_or_default());
        Doom { reason, grace: bounded(when.and_then(|when| until(&when, now))) }
    });
    Ok(dooms.min_by_key(|doom| doom.grace))
}

#[derive(Deserialize)]
struct OciInstance {
    id: String,
    state: Option<String>,
}

/// Oracle's instance metadata, `/opc/v2/instance/`: the host's own OCID, and whether its end has begun. There is no
/// notice in it before that.
///
/// <https://docs.oracle.com/iaas/Content/Compute/Tasks/gettingmetadata.htm>
pub fn oci_instance(text: &str) -> Result<(String, Option<Doom>), String> {
    let OciInstance { id, state } = read(text)?;
    let state = state.unwrap_or_default();
    let ends = ["terminating", "terminated", "stopping", "stopped"];
    let is_over = ends.iter().any(|end| state.eq_ignore_ascii_case(end));
    let doom = is_over.then(|| Doom { reason: format!("Oracle's instance is {state}"), grace: AT_ONCE });
    Ok((id, doom))
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct OciEvent {
    event_type: String,
    event_time: Option<String>,
    data: OciData,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct OciData {
    resource_id: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OciEvents {
    Several(Vec<OciEvent>),
    One(OciEvent),
}

/// Messages of Oracle's Events service, one or a list: whether the instance `own` is pre-empted.
///
/// <https://docs.oracle.com/iaas/Content/Compute/Concepts/preemptible.htm>,
/// <https://docs.oracle.com/iaas/Content/Events/Reference/eventenvelopereference.htm>
pub fn oci_event(text: &str, own: &str, now: OffsetDateTime) -> Result<Option<Doom>, String> {
    let events = match read(text)? {
        OciEvents::Several(events) => events,
        OciEvents::One(event) => vec![event],
    };
    let ours = events.into_iter().find(|event| {
        event.event_type == "com.oraclecloud.computeapi.instancepreemptionaction"
            && event.data.resource_id.as_deref() == Some(own)
    });
    Ok(ours.map(|OciEvent { event_time, .. }| {
        let since = |told: &str| until(told, now - OCI_NOTICE);
        let grace = bounded(event_time.as_deref().and_then(since)).min(OCI_NOTICE);
        Doom { reason: "Oracle pre-empts the instance".into(), grace }
    }))
}

#[derive(Deserialize)]
struct InstanceAction {
    action: String,
    time: String,
}

/// EC2's `/latest/meta-data/spot/instance-action`, which is not there before.
///
/// <https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html>
pub fn aws(text: &str, now: OffsetDateTime) -> Result<Option<Doom>, String> {
    let InstanceAction { action, time } = read(text)?;
    Ok(Some(Doom { reason: format!("EC2's instance action {action}"), grace: bounded(until(&time, now)) }))
}

/// Compute Engine's `/computeMetadata/v1/instance/preempted`.
///
/// <https://cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption>
pub fn gcp(text: &str) -> Result<Option<Doom>, String> {
    match text.trim() {
        "TRUE" => Ok(Some(Doom { reason: "Google pre-empts the instance".into(), grace: GCP_NOTICE })),
        "FALSE" => Ok(None),
        other => Err(format!("neither TRUE nor FALSE: {other:.40?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Microsoft's example of an evicted spot machine, with the name and the time of its page.
    /// <https://github.com/MicrosoftDocs/azure-compute-docs> `virtual-machines/windows/spot-powershell.md`
    const PREEMPT: &str = r#"{"DocumentIncarnation":1,"Events":[{"EventId":"A123BC45-1234-5678-AB90-ABCDEF123456",
        "EventStatus":"Scheduled","EventType":"Preempt","ResourceType":"VirtualMachine","Resources":["myspotvm"],
        "NotBefore":"Tue, 16 Mar 2021 00:58:46 GMT","Description":"","EventSource":"Platform"}]}"#;

    fn at(text: &str) -> OffsetDateTime {
        OffsetDateTime::parse(text, &Rfc3339).expect("a time")
    }

    fn grace(found: Result<Option<Doom>, String>) -> Option<u64> {
        found.expect("of the documented form").map(|doom| doom.grace.as_secs())
    }

    #[test]
    fn azures_preemption_leaves_what_is_left_until_not_before() {
        let now = at("2021-03-16T00:58:16Z");
        let doom = azure(PREEMPT, "MySpotVM", now).expect("a document").expect("a notice");
        assert_eq!((doom.reason.as_str(), doom.grace.as_secs()), ("Azure's event Preempt (Scheduled)", 30));
        assert_eq!(grace(azure(PREEMPT, "myspotvm_1", now)), None, "another machine of the scale set");
        assert_eq!(
            grace(azure(PREEMPT, "myspotvm", at("2021-03-16T09:00:00Z"))),
            Some(5),
            "by a clock that is ahead"
        );
        assert_eq!(
            grace(azure(PREEMPT, "myspotvm", at("2021-03-15T00:00:00Z"))),
            Some(900),
            "by one that is behind"
        );
    }

    #[test]
    fn of_azures_events_the_soonest_that_ends_this_machine_counts() {
        let event = |kind: &str, status: &str, resources: &str, when: &str| {
            format!(
                r#"{{"EventId": "602d9444-d2cd-49c7-8624-8643e7171297", "EventType": "{kind}",
                "ResourceType": "VirtualMachine", "Resources": {resources}, "EventStatus": "{status}",
                "NotBefore": "{when}", "Description": "Host server is undergoing maintenance.",
                "EventSource": "Platform", "DurationInSeconds": -1}}"#
            )
        };
        let document =
            |events: &[String]| format!(r#"{{"DocumentIncarnation": 7, "Events": [{}]}}"#, events.join(", "));
        let now = at("2016-09-19T18:19:47Z");
        let later = "Mon, 19 Sep 2016 18:29:47 GMT";
        for kind in ["Terminate", "Reboot", "Redeploy"] {
            let found = azure(&document(&[event(kind, "Scheduled", r#"["a", "vm_0"]"#, later)]), "vm_0", now);
            let Doom { reason, grace } = found.expect("a document").expect("a notice");
            assert_eq!(grace.as_secs(), 600);
            assert!(reason.contains(kind) && reason.ends_with(": Host server is undergoing maintenance."));
        }
        let freeze = event("Freeze", "Scheduled", r#"["vm_0"]"#, later);
        assert_eq!(grace(azure(&document(&[freeze]), "vm_0", now)), None, "a pause, after which all goes on");
        assert_eq!(grace(azure(&document(&[]), "vm_0", now)), None);
        let begun = event("Redeploy", "Started", r#"["vm_0"]"#, "");
        let both = document(&[event("Terminate", "Scheduled", r#"["vm_0"]"#, later), begun]);
        assert_eq!(grace(azure(&both, "vm_0", now)), Some(5), "it has begun");
        assert!(azure(r#"{"error": "Bad request"}"#, "vm_0", now).is_err());
    }

    /// The members that Oracle's page "Getting Instance Metadata" lists, shortened.
    const INSTANCE: &str = r#"{"availabilityDomain": "EMIr:PHX-AD-1", "faultDomain": "FAULT-DOMAIN-3",
        "compartmentId": "ocid1.tenancy.oc1..exampleuniqueID", "displayName": "my-example-instance",
        "hostname": "my-hostname", "id": "ocid1.instance.oc1.phx.exampleuniqueID",
        "image": "ocid1.image.oc1.phx.exampleuniqueID", "metadata": {"ssh_authorized_keys": "example-ssh-key"},
        "region": "phx", "canonicalRegionName": "us-phoenix-1", "shape": "VM.Standard.E3.Flex",
        "state": "Running", "timeCreated": 1600381928581}"#;

    #[test]
    fn oracles_metadata_names_the_host_and_tells_when_its_end_has_begun() {
        let (id, doom) = oci_instance(INSTANCE).expect("a document");
        assert_eq!((id.as_str(), doom), ("ocid1.instance.oc1.phx.exampleuniqueID", None));
        let ending = INSTANCE.replace("\"Running\"", "\"Terminating\"");
        let (_, doom) = oci_instance(&ending).expect("a document");
        assert_eq!(doom.expect("a notice").reason, "Oracle's instance is Terminating");
        assert!(oci_instance("<html>").is_err());
    }

    /// The envelope of "Contents of an Event Message" with the type of "Instance - Preemption Action".
    const PREEMPTION: &str = r#"{"eventType": "com.oraclecloud.computeapi.instancepreemptionaction",
        "cloudEventsVersion": "0.1", "eventTypeVersion": "2.0", "source": "ComputeApi",
        "eventTime": "2026-11-30T10:00:00.000Z", "contentType": "application/json",
        "data": {"compartmentId": "ocid1.compartment.oc1..unique_ID", "compartmentName": "example_compartment",
            "resourceName": "my_instance", "resourceId": "ocid1.instance.oc1.phx.unique_ID",
            "availabilityDomain": "availability_domain", "freeFormTags": {}, "definedTags": {},
            "additionalDetails": {"preemptionAction": "TERMINATE"}},
        "eventID": "unique_ID", "extensions": {"compartmentId": "ocid1.compartment.oc1..unique_ID"}}"#;

    #[test]
    fn oracles_event_leaves_two_minutes_from_when_it_was_emitted() {
        let own = "ocid1.instance.oc1.phx.unique_ID";
        assert_eq!(grace(oci_event(PREEMPTION, own, at("2026-11-30T10:00:20Z"))), Some(100));
        assert_eq!(grace(oci_event(PREEMPTION, own, at("2026-11-30T11:00:00Z"))), Some(5), "it is late");
        assert_eq!(
            grace(oci_event(PREEMPTION, own, at("2026-11-30T09:00:00Z"))),
            Some(120),
            "by a clock behind"
        );
        assert_eq!(
            grace(oci_event(PREEMPTION, "ocid1.instance.oc1.phx.other", at("2026-11-30T10:00:20Z"))),
            None
        );
        let several = format!("[{}, {PREEMPTION}]", PREEMPTION.replace("phx.unique_ID", "phx.other"));
        assert_eq!(grace(oci_event(&several, own, at("2026-11-30T10:01:00Z"))), Some(60));
        let launched = PREEMPTION.replace("instancepreemptionaction", "launchinstance.begin");
        assert_eq!(grace(oci_event(&launched, own, at("2026-11-30T10:00:20Z"))), None);
        assert!(oci_event("{}", own, at("2026-11-30T10:00:20Z")).is_err());
    }

    #[test]
    fn ec2_and_compute_engine_say_it_in_a_line() {
        let now = at("2017-09-18T08:20:00Z");
        let action = r#"{"action": "terminate", "time": "2017-09-18T08:22:00Z"}"#;
        assert_eq!(grace(aws(action, now)), Some(120));
        assert!(aws("404 - Not Found", now).is_err());
        assert_eq!((grace(gcp("TRUE\n")), grace(gcp("FALSE"))), (Some(30), None));
        assert!(gcp("<html>").is_err());
    }
}
